//! Pages that the repository keeps, made again from the runs that it keeps.
use std::fs;
use std::path::Path;
use taper_report::Form;

/// `docs/results/records/NAME` has the runs behind `docs/results/NAME.{html,md,svg}`, without their weights. One that has no page yet
/// is a sweep under way.
#[test]
fn kept_pages_are_what_their_records_give() {
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results");
    let mut made = 0;
    for folder in fs::read_dir(results.join("records")).unwrap() {
        let folder = folder.unwrap().path();
        let runs = taper_report::load(std::slice::from_ref(&folder)).unwrap();
        assert!(runs.problems.is_empty(), "{}: {:?}", folder.display(), runs.problems);
        let kept = |ending: &str| {
            // Not `with_extension`, which would take a part of the name for one.
            let name = format!("{}.{ending}", folder.file_name().unwrap().to_str().unwrap());
            fs::read_to_string(results.join(name))
        };
        let Ok(tables) = kept("md") else { continue };
        let title = tables.lines().next().and_then(|line| line.strip_prefix("# ")).unwrap();
        let document = taper_report::document(title, &runs);
        for (form, ending) in [(Form::Markdown, "md"), (Form::Html, "html"), (Form::Svg, "svg")] {
            let now = String::from_utf8(document.render(form).unwrap()).unwrap();
            assert!(
                now == kept(ending).unwrap(),
                "{}.{ending} is not what its records give",
                folder.display()
            );
        }
        made += 1;
    }
    assert!(made > 0);
}
