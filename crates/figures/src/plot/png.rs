//! A picture as PNG, drawn from its SVG by resvg with the fonts of the system.
use super::{STYLE, STYLES};
use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::{self, fontdb::Database};
use std::fmt::Write;
use std::sync::Arc;

/// Pixels a unit of the SVG: a panel is 1680 wide, 14 cm at 300 dots an inch.
const SCALE: f32 = 3.0;

/// A sheet of very many pictures is drawn smaller, so that it takes no more pixels (of 4 bytes) than this.
const MOST_PIXELS: f32 = 1e8;

/// The fonts of the system, with one for `sans-serif` that is there.
pub fn fonts() -> Result<Database, String> {
    let mut fonts = Database::new();
    fonts.load_system_fonts();
    let names = ["DejaVu Sans", "Liberation Sans", "Noto Sans", "Arial", "Helvetica"];
    let families = |name: &str| fonts.faces().any(|face| face.families.iter().any(|(own, _)| own == name));
    let known = names.into_iter().find(|name| families(name)).map(str::to_owned);
    let first = || fonts.faces().find_map(|face| Some(face.families.first()?.0.clone()));
    let Some(family) = known.or_else(first) else {
        return Err(
            "a PNG needs a font for its text, and this system has none: install one (DejaVu Sans or \
                    Liberation Sans, for example), or write .svg, which leaves fonts to whoever shows it"
                .into(),
        );
    };
    fonts.set_sans_serif_family(&family);
    fonts.set_serif_family(family);
    Ok(fonts)
}

/// Draws one of our own SVG files.
pub fn draw(svg: &str) -> Result<Vec<u8>, String> {
    let options = usvg::Options { fontdb: Arc::new(fonts()?), ..usvg::Options::default() };
    let tree = usvg::Tree::from_str(&plain(svg), &options).map_err(|e| format!("drawing the PNG: {e}"))?;
    let (width, height) = (tree.size().width(), tree.size().height());
    let scale = SCALE.min((MOST_PIXELS / (width * height)).sqrt());
    let pixels = |length: f32| (scale * length).ceil() as u32;
    let mut image = Pixmap::new(pixels(width), pixels(height))
        .ok_or_else(|| format!("a PNG of {width} by {height} units is too large to draw; write .svg"))?;
    resvg::render(&tree, Transform::from_scale(scale, scale), &mut image.as_mut());
    image.encode_png().map_err(|e| format!("encoding the PNG: {e}"))
}

/// An SVG without custom properties, which resvg does not know, in the light look.
fn plain(svg: &str) -> String {
    let palette = variables(".plot");
    resolved(&svg.replacen(STYLE, &plain_style(), 1), &palette)
}

/// The style sheet with a rule for every style in place of the properties that a style sets.
fn plain_style() -> String {
    let mut out = String::new();
    for (selector, body) in rules() {
        if body.trim_start().starts_with("--") {
            continue;
        }
        if !body.contains("var(--c)") {
            // Writing to a String cannot fail, here and below.
            let _ = writeln!(out, "{selector} {{{body}}}");
            continue;
        }
        for style in 0..STYLES {
            let own = format!(".plot .s{style}");
            let (selector, body) = (selector.replacen(".plot", &own, 1), resolved(body, &variables(&own)));
            let _ = writeln!(out, "{selector} {{{body}}}");
        }
    }
    out
}

/// The custom properties that a rule of the style sheet sets.
fn variables(selector: &str) -> Vec<(&'static str, &'static str)> {
    let bodies = rules().into_iter().filter(|(own, _)| *own == selector).map(|(_, body)| body);
    let set = bodies.flat_map(|body| body.split(';')).filter_map(|line| line.split_once(':'));
    set.map(|(name, value)| (name.trim(), value.trim())).filter(|(name, _)| name.starts_with("--")).collect()
}

/// A text with the values of some custom properties in their places.
fn resolved(text: &str, variables: &[(&str, &str)]) -> String {
    let put = |text: String, (name, value): &(&str, &str)| text.replace(&format!("var({name})"), value);
    variables.iter().fold(text.to_owned(), put)
}

/// Selectors and bodies of the style sheet's rules but those for dark pages and print.
fn rules() -> Vec<(&'static str, &'static str)> {
    let mut out = Vec::new();
    let mut rest = STYLE;
    while let Some((selector, after)) = rest.split_once('{') {
        // A media rule holds rules, each of which ends before it does.
        let end = if selector.trim().starts_with('@') { "}\n}" } else { "}" };
        let Some((body, next)) = after.split_once(end) else { break };
        if end == "}" {
            out.push((selector.trim(), body));
        }
        rest = next;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_property_is_left_and_every_style_has_its_colour() {
        let svg = plain(&format!("<svg><style>\n{STYLE}</style><rect style=\"fill: var(--paper)\"/></svg>"));
        assert!(!svg.contains("var(") && !svg.contains("--") && !svg.contains('@'), "{svg}");
        assert!(svg.contains("style=\"fill: #ffffff\""), "the light look: {svg}");
        let rule = ".plot .s1 .line { stroke: #0072b2; stroke-width: 1.8; fill: none; stroke-linejoin: round; \
                    stroke-dasharray: 7 3; }";
        assert!(svg.contains(rule), "{svg}");
        assert_eq!(svg.matches(" .marks {").count(), STYLES);
    }

    #[test]
    fn a_picture_is_drawn_with_its_colours_and_its_text() {
        let draw = |text: &str, style: usize| {
            let body = format!(
                "<rect width=\"100\" height=\"20\" style=\"fill: var(--paper)\"/>\
                 <g class=\"s{style}\"><path class=\"line\" d=\"M0 10H100\"/></g><text x=\"5\" y=\"15\">{text}</text>"
            );
            let svg = format!(
                "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"plot\" viewBox=\"0 0 100 20\" width=\"100\" \
                 height=\"20\"><style>{STYLE}</style>{body}</svg>"
            );
            let Ok(_) = fonts() else { return None };
            Pixmap::decode_png(&super::draw(&svg).unwrap()).ok()
        };
        // Where there is no font there is no picture; what is said then is for the command's own test.
        let Some(image) = draw("", 0) else { return };
        assert_eq!((image.width(), image.height()), (300, 60));
        let at = |x, y| image.pixel(x, y).map(|p| (p.red(), p.green(), p.blue()));
        assert_eq!(at(150, 30), Some((0xb9, 0x38, 0x0e)), "the line of the first style");
        assert_eq!(at(150, 5), Some((255, 255, 255)), "the paper");
        assert_ne!(draw("abc", 0), draw("", 0), "letters are drawn");
        assert_ne!(draw("", 1), draw("", 0));
    }
}
