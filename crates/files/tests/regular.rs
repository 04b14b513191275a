//! Files that may never begin or never end are not read.
use std::fs;
use std::path::Path;
use taper_files::{read_regular, sha256_file};

#[test]
fn only_regular_files_are_read_and_no_more_of_them_than_the_limit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, b"four").unwrap();
    assert_eq!(read_regular(&path, 4).unwrap(), b"four");
    let refused = |path: &Path, limit| read_regular(path, limit).unwrap_err().source.to_string();
    assert_eq!(refused(&path, 3), "expected a file of at most 3 bytes, found 4");
    assert_eq!(refused(folder.path(), 9), "expected a regular file, found a folder");
    #[cfg(unix)]
    {
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        assert_eq!(refused(&pipe, 9), "expected a regular file, found a pipe");
        assert_eq!(
            sha256_file(&pipe).unwrap_err().source.to_string(),
            "expected a regular file, found a pipe"
        );
        assert_eq!(refused(Path::new("/dev/zero"), 9), "expected a regular file, found a device");
    }
}
