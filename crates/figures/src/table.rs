//! Tables for people and programs: aligned Markdown, LaTeX with booktabs, HTML and CSV.
use crate::plot::{escape, visible};
use crate::stats::Interval;
use serde_json::Value;
use std::fmt::Write;

/// A table of text cells; the first column is left-aligned, all others right-aligned unless they are [text](Table::text).
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// What it shows; empty for none.
    pub caption: String,
    /// What to know to read it, one line each, below it.
    pub notes: Vec<String>,
    head: Vec<String>,
    rows: Vec<Vec<String>>,
    /// Which columns hold names and other text.
    text: Vec<bool>,
}

impl Table {
    /// A table with these column titles.
    pub fn new<S: Into<String>>(head: impl IntoIterator<Item = S>) -> Self {
        let head: Vec<String> = head.into_iter().map(Into::into).collect();
        let text = (0..head.len()).map(|column| column == 0).collect();
        Self { head, text, ..Self::default() }
    }

    /// With what it shows, above it.
    pub fn caption(mut self, caption: impl Into<String>) -> Self {
        self.caption = caption.into();
        self
    }

    /// With these columns of text too, which are left-aligned.
    pub fn text(mut self, columns: &[&str]) -> Self {
        for (text, title) in self.text.iter_mut().zip(&self.head) {
            *text |= columns.contains(&title.as_str());
        }
        self
    }

    /// Without the column of this title if it is empty.
    pub fn without_empty(mut self, title: &str) -> Self {
        let Some(column) = self.head.iter().position(|head| head == title) else { return self };
        if self.rows.iter().all(|row| row[column].is_empty()) {
            self.head.remove(column);
            self.text.remove(column);
            self.rows.iter_mut().for_each(|row| {
                row.remove(column);
            });
        }
        self
    }

    /// Adds a row; missing cells are empty.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        let mut cells: Vec<String> = cells.into_iter().map(Into::into).collect();
        cells.resize(self.head.len(), String::new());
        self.rows.push(cells);
    }

    /// Adds a line below it, once.
    pub fn note(&mut self, note: impl Into<String>) {
        let note = note.into();
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Whether it has no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// As Markdown, aligned so that it reads well as plain text too.
    pub fn markdown(&self) -> String {
        let escaped = |cells: &[String]| cells.iter().map(|c| markdown_text(c)).collect::<Vec<_>>();
        let (head, rows) = (escaped(&self.head), self.rows.iter().map(|r| escaped(r)).collect::<Vec<_>>());
        let width = |column: usize| {
            let cells = std::iter::once(&head).chain(&rows).map(|row| row[column].chars().count());
            cells.max().unwrap_or(0).max(3)
        };
        let widths: Vec<usize> = (0..head.len()).map(width).collect();
        let line = |cells: &[String]| {
            let padded = cells.iter().zip(&widths).enumerate().map(|(i, (cell, width))| {
                let space = " ".repeat(width.saturating_sub(cell.chars().count()));
                if self.text[i] { format!("{cell}{space}") } else { format!("{space}{cell}") }
            });
            format!("| {} |\n", padded.collect::<Vec<_>>().join(" | "))
        };
        let rule = widths.iter().enumerate().map(|(i, width)| match self.text[i] {
            true => "-".repeat(*width),
            false => format!("{}:", "-".repeat(width - 1)),
        });
        let rule = format!("| {} |\n", rule.collect::<Vec<_>>().join(" | "));
        let mut out = String::new();
        if !self.caption.is_empty() {
            out += &format!("**{}**\n\n", markdown_text(&self.caption));
        }
        out += &line(&head);
        out += &rule;
        rows.iter().for_each(|row| out += &line(row));
        if !self.notes.is_empty() {
            out.push('\n');
        }
        for note in &self.notes {
            out += &format!("- {}\n", markdown_text(note));
        }
        out
    }

    /// As LaTeX; needs `\usepackage{booktabs}`.
    pub fn latex(&self) -> String {
        let line = |cells: &[String]| {
            format!("{} \\\\\n", cells.iter().map(|c| latex_text(c)).collect::<Vec<_>>().join(" & "))
        };
        let columns: String = self.text.iter().map(|text| if *text { 'l' } else { 'r' }).collect();
        let mut out = String::from("\\begin{table}\n\\centering\n");
        if !self.caption.is_empty() {
            let _ = writeln!(out, "\\caption{{{}}}", latex_text(&self.caption));
        }
        let _ = write!(out, "\\begin{{tabular}}{{{columns}}}\n\\toprule\n{}\\midrule\n", line(&self.head));
        self.rows.iter().for_each(|row| out += &line(row));
        out += "\\bottomrule\n\\end{tabular}\n";
        if !self.notes.is_empty() {
            out += "\\par\\smallskip\\footnotesize\n";
        }
        for note in &self.notes {
            let _ = writeln!(out, "{}\\par", latex_text(note));
        }
        out + "\\end{table}\n"
    }

    /// As CSV (RFC 4180 with line feeds), without caption and notes.
    pub fn csv(&self) -> String {
        let line =
            |cells: &Vec<String>| cells.iter().map(|c| csv_text(c)).collect::<Vec<_>>().join(",") + "\n";
        std::iter::once(&self.head).chain(&self.rows).map(line).collect()
    }

    /// One JSON object a row, by column title: what reads as a number is one, an empty cell is null.
    pub fn json_lines(&self) -> String {
        let value = |(cell, text): (&String, &bool)| match cell.parse::<f64>() {
            _ if cell.is_empty() => Value::Null,
            // Infinities and NaN stay words: JSON has no numbers for them.
            Ok(number) if !text && number.is_finite() => match cell.parse::<i64>() {
                Ok(whole) => whole.into(),
                Err(_) => number.into(),
            },
            _ => cell.as_str().into(),
        };
        let line = |row: &Vec<String>| {
            let cells = self.head.iter().cloned().zip(row.iter().zip(&self.text).map(value));
            Value::Object(cells.collect()).to_string() + "\n"
        };
        self.rows.iter().map(line).collect()
    }

    /// As an HTML table.
    pub fn html(&self) -> String {
        let mut out = String::from("<div class=\"table\"><table>");
        // Writing to a String cannot fail, here and below.
        if !self.caption.is_empty() {
            let _ = write!(out, "<caption>{}</caption>", escape(&self.caption));
        }
        let titles = self.head.iter().zip(&self.text).map(|(title, text)| {
            format!("<th scope=\"col\"{}>{}</th>", if *text { "" } else { " class=\"n\"" }, escape(title))
        });
        let _ = write!(out, "<thead><tr>{}</tr></thead><tbody>", titles.collect::<String>());
        for row in &self.rows {
            let cells = row.iter().enumerate().map(|(i, cell)| match (i, self.text[i]) {
                (0, _) => format!("<th scope=\"row\">{}</th>", escape(cell)),
                (_, true) => format!("<td class=\"t\">{}</td>", escape(cell)),
                (_, false) => format!("<td>{}</td>", escape(cell)),
            });
            let _ = write!(out, "<tr>{}</tr>", cells.collect::<String>());
        }
        out += "</tbody></table></div>";
        if !self.notes.is_empty() {
            let notes: String = self.notes.iter().map(|note| format!("<li>{}</li>", escape(note))).collect();
            let _ = write!(out, "<ul class=\"notes\">{notes}</ul>");
        }
        out
    }
}

/// The unit of a metric, to stand after its [`amount`]; the metric with or without its split (`test.accuracy`).
pub fn unit(metric: &str) -> &'static str {
    if metric.ends_with("accuracy") { " %" } else { "" }
}

/// A value of a metric for people in its [unit](fn@unit), with the number after ± if there is one: `97.41 ± 0.12`.
pub fn amount(metric: &str, value: f64, half_width: Option<f64>) -> String {
    let small = value != 0.0 && value.abs() < 1e-2;
    let number = |x: f64| match metric.rsplit('.').next() {
        Some("accuracy") => format!("{:.2}", 100.0 * x),
        Some("perplexity") => format!("{x:.2}"),
        _ if small || value.abs() >= 1e5 => format!("{x:.3e}"),
        _ => format!("{x:.4}"),
    };
    match half_width {
        Some(half) => format!("{} ± {}", number(value), number(half)),
        None => number(value),
    }
}

/// A mean as an [`amount`], with half of its interval if it has one.
pub fn mean_text(metric: &str, mean: &Interval) -> String {
    amount(metric, mean.mean, mean.half_width())
}

/// One line of text that Markdown takes for nothing else.
pub fn markdown_text(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in visible(text).chars() {
        match c {
            '|' | '`' | '\\' | '[' | ']' | '*' => out.extend(['\\', c]),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// Text that LaTeX sets as it stands.
pub fn latex_text(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in visible(text).chars() {
        match c {
            '&' | '%' | '$' | '#' | '_' | '{' | '}' => out.extend(['\\', c]),
            '\\' => out.push_str("\\textbackslash{}"),
            '~' => out.push_str("\\textasciitilde{}"),
            '^' => out.push_str("\\textasciicircum{}"),
            '<' => out.push_str("$<$"),
            '>' => out.push_str("$>$"),
            '±' => out.push_str("$\\pm$"),
            '×' => out.push_str("$\\times$"),
            '−' => out.push_str("$-$"),
            '≤' => out.push_str("$\\le$"),
            '≥' => out.push_str("$\\ge$"),
            '√' => out.push_str("$\\surd$"),
            '∞' => out.push_str("$\\infty$"),
            '–' => out.push_str("--"),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// A CSV cell. Text that a spreadsheet would take for a formula is marked as text.
fn csv_text(text: &str) -> String {
    let formula = text.starts_with(['=', '+', '-', '@', '\t', '\r']) && text.parse::<f64>().is_err();
    let text = if formula { format!("'{text}") } else { text.to_owned() };
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(["optimizer", "best"]);
        table.row(["decgd", "97.90 %"]);
        table.row(["adam"]);
        let expected = "| optimizer |    best |\n| --------- | ------: |\n| decgd     | 97.90 % |\n| adam      |         |\n";
        assert_eq!(table.markdown(), expected);
    }

    #[test]
    fn both_numbers_of_an_amount_have_the_digits_of_the_value() {
        let cases = [
            ("test.accuracy", 0.97412, Some(0.0012), "97.41 ± 0.12"),
            ("perplexity", 61.2345, Some(0.5), "61.23 ± 0.50"),
            ("loss", 0.0, None, "0.0000"),
            ("test.loss", 0.25, Some(0.1), "0.2500 ± 0.1000"),
            ("loss", 1e-27, Some(2e-28), "1.000e-27 ± 2.000e-28"),
        ];
        for (metric, value, half, text) in cases {
            assert_eq!(amount(metric, value, half), text);
        }
        assert_eq!([unit("test.accuracy"), unit("loss")], [" %", ""]);
    }

    #[test]
    fn every_form_escapes_what_it_would_take_for_its_own() {
        let mut table = Table::new(["a_b", "x & y"]).caption("50 % <b>");
        table.row(["=HYPERLINK(\"x\")", "1 | 2 ± 0.1"]);
        table.row(["-3", "~^\\{}$#"]);
        table.note("a\nb");
        assert_eq!(
            table.markdown(),
            "**50 % &lt;b&gt;**\n\n| a_b             |    x &amp; y |\n| --------------- | -----------: |\n\
             | =HYPERLINK(\"x\") | 1 \\| 2 ± 0.1 |\n| -3              |     ~^\\\\{}$# |\n\n- a b\n"
        );
        assert_eq!(
            table.latex(),
            "\\begin{table}\n\\centering\n\\caption{50 \\% $<$b$>$}\n\\begin{tabular}{lr}\n\\toprule\na\\_b & x \\& y \\\\\n\
             \\midrule\n=HYPERLINK(\"x\") & 1 | 2 $\\pm$ 0.1 \\\\\n\
             -3 & \\textasciitilde{}\\textasciicircum{}\\textbackslash{}\\{\\}\\$\\# \\\\\n\\bottomrule\n\\end{tabular}\n\
             \\par\\smallskip\\footnotesize\na b\\par\n\\end{table}\n"
        );
        assert_eq!(table.csv(), "a_b,x & y\n\"'=HYPERLINK(\"\"x\"\")\",1 | 2 ± 0.1\n-3,~^\\{}$#\n");
        assert!(
            table.html().contains("<th scope=\"row\">=HYPERLINK(&quot;x&quot;)</th><td>1 | 2 ± 0.1</td>")
        );
    }
}
