//! Tables for people: aligned text in a terminal, Markdown in files.

/// A table of text cells; the first column is left-aligned, all others right-aligned.
#[derive(Clone, Debug, Default)]
pub struct Table {
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column titles.
    pub fn new<S: Into<String>>(head: impl IntoIterator<Item = S>) -> Self {
        Self { head: head.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    /// Adds a row; missing cells are empty.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        let mut cells: Vec<String> = cells.into_iter().map(Into::into).collect();
        cells.resize(self.head.len(), String::new());
        self.rows.push(cells);
    }

    /// As Markdown, aligned so that it reads well as plain text too.
    pub fn markdown(&self) -> String {
        let width = |column: usize| {
            let cells = std::iter::once(&self.head).chain(&self.rows).map(|row| row[column].chars().count());
            cells.max().unwrap_or(0).max(3)
        };
        let widths: Vec<usize> = (0..self.head.len()).map(width).collect();
        let line = |cells: &[String]| {
            let padded = cells.iter().zip(&widths).enumerate().map(|(i, (cell, width))| {
                let space = " ".repeat(width.saturating_sub(cell.chars().count()));
                if i == 0 { format!("{cell}{space}") } else { format!("{space}{cell}") }
            });
            format!("| {} |\n", padded.collect::<Vec<_>>().join(" | "))
        };
        let rule = widths.iter().enumerate().map(|(i, width)| match i {
            0 => "-".repeat(*width),
            _ => format!("{}:", "-".repeat(width - 1)),
        });
        let rule = format!("| {} |\n", rule.collect::<Vec<_>>().join(" | "));
        line(&self.head) + &rule + &self.rows.iter().map(|row| line(row)).collect::<String>()
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
}
