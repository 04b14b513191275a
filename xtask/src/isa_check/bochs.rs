//! A machine with AVX-512, played whole by Bochs: qemu, which plays a program alone, knows AVX2 at most.
//!
//! It starts a Linux kernel from a CD that holds the test programs and the libraries they load, and tells over its serial line how they
//! end. One core of some 30 million instructions a second: it proves results, not speed.
use super::{Machine, Test, root, target};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

pub const MACHINE: Machine = Machine { name: "Skylake-X", emulator: &[], isa: "avx512" };

const BOOT: &str = "/usr/lib/ISOLINUX/isolinux.bin";
const LOADER: &str = "/usr/lib/syslinux/modules/bios/ldlinux.c32";
const BIOS: &str = "/usr/share/bochs/BIOS-bochs-latest";
const VGA: &str = "/usr/share/bochs/VGABIOS-lgpl-latest";

/// No machine that works is silent for so long: the longest test takes a part of it.
const SILENCE: Duration = Duration::from_secs(3600);

/// What it takes and is not there.
pub fn missing() -> Option<String> {
    let files = [BIOS, VGA, BOOT, LOADER].map(Path::new);
    let programs = ["bochs-bin", "busybox", "script", "xorriso", "cpio", "ldd"];
    let found = |name: &str| {
        std::env::var_os("PATH")
            .is_some_and(|path| std::env::split_paths(&path).any(|p| p.join(name).is_file()))
    };
    let packages = "bochs bochs-term bsdutils busybox-static cpio isolinux syslinux-common xorriso";
    let gone = files.iter().find(|path| !path.is_file()).map(|path| path.display().to_string());
    let gone = gone.or_else(|| programs.iter().find(|name| !found(name)).map(|name| (*name).to_owned()));
    match gone {
        Some(gone) => Some(format!("no {gone}; on Debian: apt-get install {packages}")),
        None => kernel().is_none().then(|| {
            "no Linux kernel: name one in TAPER_VMLINUZ (Debian's package linux-image-cloud-amd64 has one)".into()
        }),
    }
}

/// The kernel that is started.
fn kernel() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("TAPER_VMLINUZ") {
        return Some(PathBuf::from(path)).filter(|path| path.is_file());
    }
    let mut there: Vec<PathBuf> = fs::read_dir("/boot").ok()?.flatten().map(|entry| entry.path()).collect();
    there.retain(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz")));
    there.into_iter().max()
}

/// Runs test programs on the machine, each in its crate's folder and without the tests that it is told to leave out. True if
/// all of them pass.
pub fn passes(tests: &[(Test, PathBuf)]) -> bool {
    match Disc::burn(tests).and_then(|disc| disc.start()) {
        Ok(ok) => ok,
        Err(e) => {
            eprintln!("error: {}: {e}", MACHINE.name);
            false
        }
    }
}

/// What the machine starts from.
struct Disc {
    folder: PathBuf,
}

impl Disc {
    fn burn(tests: &[(Test, PathBuf)]) -> Result<Self, String> {
        let folder = target().join("isa-check").join(MACHINE.name);
        let (cd, files) = (folder.join("cd"), folder.join("files"));
        let _ = fs::remove_dir_all(&folder);
        let said = |e: std::io::Error| e.to_string();
        for place in [&cd, &files.join("proc"), &files.join("dev"), &files.join("tmp"), &files.join("bin")] {
            fs::create_dir_all(place).map_err(said)?;
        }
        let busybox = Command::new("sh").args(["-c", "command -v busybox"]).output().map_err(said)?;
        let busybox = PathBuf::from(String::from_utf8_lossy(&busybox.stdout).trim());
        fs::copy(&busybox, files.join("bin/busybox")).map_err(|e| format!("{}: {e}", busybox.display()))?;
        let mut job = String::from(
            "#!/bin/busybox sh\nb=/bin/busybox\n$b mount -t proc proc /proc\n$b mount -t tmpfs tmp /tmp\nrc=0\n",
        );
        for (at, (test, path)) in tests.iter().enumerate() {
            let program = format!("/bin/test{at}");
            fs::copy(path, files.join(&program[1..])).map_err(|e| format!("{}: {e}", path.display()))?;
            for library in libraries(path)? {
                copy(&library, &files)?;
            }
            let krate = root().join("crates").join(test.krate);
            fs::create_dir_all(files.join(relative(&krate))).map_err(said)?;
            copy(&krate.join("tests/golden"), &files)?;
            let skipped: String = test.slow.iter().map(|slow| format!(" --skip {slow}")).collect();
            job += &format!("$b echo 'tests of {}'\n", test.name);
            job += &format!("cd '{}' && {program} --test-threads=1{skipped} || rc=1\n", krate.display());
        }
        job += "$b echo \"ended: $rc\"\n$b poweroff -f\n";
        let init = files.join("init");
        fs::write(&init, job).map_err(said)?;
        #[cfg(unix)]
        fs::set_permissions(&init, std::os::unix::fs::PermissionsExt::from_mode(0o755)).map_err(said)?;
        let kernel = kernel().ok_or("no Linux kernel")?;
        let name = |path: &Path| path.file_name().map(|name| cd.join(name)).unwrap_or_default();
        for path in [Path::new(BOOT), Path::new(LOADER)] {
            fs::copy(path, name(path)).map_err(|e| format!("{}: {e}", path.display()))?;
        }
        fs::copy(&kernel, cd.join("vmlinuz")).map_err(|e| format!("{}: {e}", kernel.display()))?;
        // Bochs saves compacted states in a size that Linux does not expect: it must not use them (bits 321 and 323).
        fs::write(
            cd.join("isolinux.cfg"),
            "default linux\nprompt 0\nlabel linux\n  kernel vmlinuz\n  append initrd=files console=ttyS0,115200 quiet \
             clearcpuid=321,323 mitigations=off nokaslr tsc=reliable lpj=100000 random.trust_cpu=on\n",
        )
        .map_err(said)?;
        let pack = "cd files && find . | cpio --quiet -o -H newc > ../cd/files && cd .. && xorriso -as mkisofs -quiet \
                    -o disc.iso -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 -boot-info-table cd";
        let packed = Command::new("sh").args(["-ec", pack]).current_dir(&folder).output().map_err(said)?;
        if !packed.status.success() {
            return Err(String::from_utf8_lossy(&packed.stderr).trim().to_owned());
        }
        Ok(Self { folder })
    }

    /// Starts the machine, repeats what it says, and waits until it tells how the tests ended.
    fn start(&self) -> Result<bool, String> {
        let said = |e: std::io::Error| e.to_string();
        let settings = format!(
            "memory: guest=2048, host=2048\n\
             cpu: model=corei7_skylake_x, count=1, ips=100000000, reset_on_triple_fault=0\n\
             romimage: file={BIOS}\nvgaromimage: file={VGA}\n\
             ata0: enabled=1\nata0-master: type=cdrom, path=disc.iso, status=inserted\nboot: cdrom\n\
             com1: enabled=1, mode=file, dev=serial.txt\ndisplay_library: term\nsound: driver=dummy\n\
             speaker: enabled=0\nlog: bochs.txt\npanic: action=fatal\nerror: action=ignore\nclock: sync=none\n"
        );
        fs::write(self.folder.join("bochsrc"), settings).map_err(said)?;
        // Debian's is built with a debugger, which waits to be told to go on.
        fs::write(self.folder.join("go"), "c\n").map_err(said)?;
        let mut machine = Command::new("script");
        // Its display is a terminal, which `script` makes.
        machine.args(["-qec", "echo $$ > pid; exec bochs-bin -q -f bochsrc -rc go", "/dev/null"]);
        machine.env("TERM", "xterm");
        machine.current_dir(&self.folder).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut machine = Running { script: machine.spawn().map_err(said)?, pid: self.folder.join("pid") };
        let serial = self.folder.join("serial.txt");
        let (mut told, mut last, mut watched) = (0, Instant::now(), false);
        loop {
            sleep(Duration::from_millis(500));
            watched = watched || machine.watch();
            let over = machine.script.try_wait().map_err(said)?.is_some();
            let text = fs::read(&serial).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            let whole = text.rfind('\n').map_or(0, |end| end + 1);
            if whole > told {
                for line in text[told..whole].lines() {
                    println!("{}: {}", MACHINE.name, line.trim_end());
                    if let Some(rc) = line.trim().strip_prefix("ended: ") {
                        return Ok(rc == "0");
                    }
                }
                (told, last) = (whole, Instant::now());
            }
            if over {
                return Err(format!("it stopped before its tests did; see {}", self.folder.display()));
            }
            if last.elapsed() > SILENCE {
                return Err(format!("nothing heard for an hour; see {}", serial.display()));
            }
        }
    }
}

/// A machine that is switched off when nobody looks any more.
struct Running {
    script: Child,
    /// The file with the number of its process, which outlives its terminal.
    pid: PathBuf,
}

impl Running {
    /// Looks at its screen, which is the other end of a terminal that it opens: when nobody does, it waits for ever as soon as
    /// that is full. False while there is none.
    fn watch(&self) -> bool {
        let screen = || -> Option<fs::File> {
            let pid = fs::read_to_string(&self.pid).ok()?;
            let open = fs::read_dir(Path::new("/proc").join(pid.trim()).join("fdinfo")).ok()?;
            let about = open.flatten().filter_map(|entry| fs::read_to_string(entry.path()).ok());
            let number =
                about.filter_map(|text| Some(text.split_once("tty-index:")?.1.trim().to_owned())).next()?;
            fs::File::open(Path::new("/dev/pts").join(number)).ok()
        };
        let Some(mut screen) = screen() else { return false };
        // It ends when the machine does.
        std::thread::spawn(move || std::io::copy(&mut screen, &mut std::io::sink()));
        true
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(pid) = fs::read_to_string(&self.pid) {
            let _ = Command::new("kill").args(["-KILL", pid.trim()]).stderr(Stdio::null()).status();
        }
        let _ = self.script.kill();
        let _ = self.script.wait();
    }
}

/// A path below `/` without that.
fn relative(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

/// Copies a file, or a folder of files, to the same place below `files`. What is not there is not copied.
fn copy(path: &Path, files: &Path) -> Result<(), String> {
    let said = |e: std::io::Error| format!("{}: {e}", path.display());
    let to = files.join(relative(path));
    if path.is_dir() {
        for entry in fs::read_dir(path).map_err(said)? {
            copy(&entry.map_err(said)?.path(), files)?;
        }
    } else if path.is_file() && !to.exists() {
        to.parent().map_or(Ok(()), fs::create_dir_all).map_err(said)?;
        fs::copy(path, &to).map_err(said)?;
    }
    Ok(())
}

/// The libraries that a program loads.
fn libraries(program: &Path) -> Result<Vec<PathBuf>, String> {
    let output = Command::new("ldd").arg(program).output().map_err(|e| format!("ldd: {e}"))?;
    Ok(loaded(&String::from_utf8_lossy(&output.stdout)))
}

/// The paths in what `ldd` prints.
fn loaded(text: &str) -> Vec<PathBuf> {
    let words = text.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    words.map(PathBuf::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_those_with_a_path() {
        let text = "\tlinux-vdso.so.1 (0x7ffd)\n\tlibc.so.6 => /lib/libc.so.6 (0x7f)\n\t/lib64/ld-linux-x86-64.so.2 (0x7f)\n";
        assert_eq!(loaded(text), ["/lib/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from));
        assert_eq!(loaded("\tstatically linked\n"), Vec::<PathBuf>::new());
    }
}
