//! One process a run: a lock of the operating system, which ends with its process, however that ends. Beside it stand the holder's
//! name and a heartbeat, for machines that share the folder and not their processes.
//!
//! Whether a holder is gone is known by the lock on its own machine, and elsewhere by its heartbeat: the time of the lock file,
//! which a living holder sets anew every [`BEAT`]. After [`STALE`] without one it is taken over, even where a file server still
//! keeps the lock of a machine that died. On a file system without locks the same is judged by the process's number and the
//! heartbeat alone.
use super::{Options, RunError};
use std::fmt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};
use tracing::{info, warn};

/// A holder on another machine that has given no sign of life for so long is gone.
pub(crate) const STALE: Duration = Duration::from_secs(120);
/// How often a holder gives one.
const BEAT: Duration = Duration::from_secs(15);
/// How often a process that waits looks again.
const LOOK: Duration = Duration::from_millis(50);
/// What Linux calls `ENOLCK`: NFS without a lock daemon.
const NO_LOCKS: i32 = if cfg!(target_os = "linux") { 37 } else { 77 };

/// Held while a run is trained. Its file stays, empty, when it is released.
pub(crate) struct Lock {
    file: File,
    beat: Option<(Sender<()>, JoinHandle<()>)>,
    lost: Arc<AtomicBool>,
}

impl Lock {
    /// Locks a run's folder if it is there: who must wait hears of it before long preparations.
    pub fn early(folder: &Path, options: &Options) -> Result<Option<Self>, RunError> {
        folder.is_dir().then(|| Self::acquire(folder, options)).transpose()
    }

    /// Locks a run's folder. Where another process is at work in it, waits for that or says who it is.
    pub fn acquire(folder: &Path, options: &Options) -> Result<Self, RunError> {
        let mut waited = false;
        loop {
            match take(folder, Holder::this(), File::try_lock) {
                Err(RunError::Busy { holder, .. }) if options.wait => {
                    if options.stop.load(Ordering::Relaxed) {
                        return Err(RunError::Interrupted { step: 0 });
                    }
                    if !waited {
                        info!("{}: {holder} is at work on it: waiting for that", folder.display());
                        waited = true;
                    }
                    std::thread::sleep(LOOK);
                }
                result => return Self::holding(result?, folder, options),
            }
        }
    }

    /// A lock that was taken, and its heartbeat.
    fn holding(file: File, folder: &Path, options: &Options) -> Result<Self, RunError> {
        let path = folder.join(".lock");
        let lost = Arc::new(AtomicBool::new(false));
        let mut pulse = Pulse {
            file: file.try_clone().map_err(RunError::io(&path))?,
            path,
            lost: lost.clone(),
            stop: options.stop.clone(),
        };
        let (end, ended) = mpsc::channel();
        let thread = std::thread::Builder::new().name("heartbeat".into()).spawn(move || pulse.run(&ended));
        let thread = thread.map_err(RunError::io(folder))?;
        Ok(Self { file, beat: Some((end, thread)), lost })
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if let Some((end, thread)) = self.beat.take() {
            drop(end);
            // It holds a handle of the file, and the lock ends with the last of them.
            let _ = thread.join();
        }
        if !self.lost.load(Ordering::Relaxed) {
            // The lock goes with the file's handle; the name in it is only for others.
            let _ = self.file.set_len(0);
        }
    }
}

/// The holder's signs of life.
struct Pulse {
    file: File,
    path: PathBuf,
    lost: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
}

impl Pulse {
    fn run(&mut self, ended: &Receiver<()>) {
        while ended.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout) {
            if !mine(&mut self.file, &self.path, Holder::this()) {
                self.lost.store(true, Ordering::Relaxed);
                self.stop.store(true, Ordering::Relaxed);
                warn!(
                    "{}: another process has taken this run over: this one gave no sign of life for {STALE:?}, or the file \
                     system's locks do not reach other machines; it stops",
                    self.path.display()
                );
                return;
            }
            // One that fails is followed by others.
            let _ = self.file.set_modified(SystemTime::now());
        }
    }
}

/// Who is at work in a folder, as far as its name and heartbeat tell: asked without touching the lock, which has the last word.
pub(crate) fn holder(folder: &Path) -> Option<String> {
    at_work(folder).map(|at_work| at_work.to_string())
}

/// A process that is at work on a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AtWork {
    holder: Holder,
    /// Whether it is a process of this machine.
    pub here: bool,
    /// The time since its last sign of life; it gives one every quarter of a minute.
    pub silent: Duration,
}

impl AtWork {
    /// Its number on its machine.
    pub fn process(&self) -> u32 {
        self.holder.process
    }

    /// Its machine.
    pub fn host(&self) -> &str {
        &self.holder.host
    }

    /// Whether the process of its number on this machine is still the one that holds the run, and not a later one.
    pub fn is_same(&self) -> bool {
        self.here && started(self.holder.process).is_some_and(|started| started == self.holder.started)
    }
}

impl fmt::Display for AtWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.holder.said(Holder::this(), self.silent))
    }
}

/// Who is at work on the run in a folder, as far as its lock file tells; nothing is touched.
pub fn at_work(folder: &Path) -> Option<AtWork> {
    let mut file = File::open(folder.join(".lock")).ok()?;
    let holder = Holder::read(&mut file)?;
    let (silent, here) = (age(&file), holder.neighbour(Holder::this()));
    holder.alive(Holder::this(), silent).then_some(AtWork { holder, here, silent })
}

/// Why locks in a folder cannot keep processes of several machines apart; `None` where they can, as far as this machine knows.
pub(crate) fn unshared(folder: &Path) -> Result<Option<String>, RunError> {
    let probe = tempfile_in(folder)?;
    let locked = probe.0.try_lock();
    if let Err(TryLockError::Error(e)) = &locked
        && no_locks(e)
    {
        return Ok(Some(format!("the file system has no locks ({e})")));
    }
    let path = folder.canonicalize().map_err(RunError::io(folder))?;
    Ok(fs::read_to_string("/proc/self/mountinfo").ok().and_then(|mounts| local_locks(&mounts, &path)))
}

/// A file for the moment, removed when it is dropped.
struct Probe(File, PathBuf);

fn tempfile_in(folder: &Path) -> Result<Probe, RunError> {
    fs::create_dir_all(folder).map_err(RunError::io(folder))?;
    let path = folder.join(format!(".locks-{}", std::process::id()));
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(false).open(&path);
    Ok(Probe(file.map_err(RunError::io(&path))?, path))
}

impl Drop for Probe {
    fn drop(&mut self) {
        // An empty file that stays is no harm.
        let _ = fs::remove_file(&self.1);
    }
}

/// What a table of mounts says against the locks of `path`: options that keep them on this machine.
fn local_locks(mountinfo: &str, path: &Path) -> Option<String> {
    // Fields: id, parent, device, root, mount point, options, …, `-`, type, source, options of the file system.
    let mounts = mountinfo.lines().filter_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let point = before.split(' ').nth(4)?.replace("\\040", " ");
        let mut after = after.split(' ');
        Some((point, after.next()?, after.nth(1)?))
    });
    let holds = mounts.filter(|(point, ..)| path.starts_with(point));
    // Of two mounts at one point the later one is seen.
    let (point, kind, options) = holds.enumerate().max_by_key(|(i, (point, ..))| (point.len(), *i))?.1;
    let local = ["nolock", "local_lock=all", "local_lock=flock", "localflock"];
    let found = options.split(',').find(|option| local.contains(option))?;
    Some(format!("{point} ({kind}) is mounted with `{found}`"))
}

/// Locks a run's folder for `own`, or says who is at work in it.
fn take(
    folder: &Path,
    own: &Holder,
    try_lock: impl Fn(&File) -> Result<(), TryLockError>,
) -> Result<File, RunError> {
    let path = folder.join(".lock");
    let io = |e| RunError::io(&path)(e);
    let busy = |holder: Option<String>| {
        let holder = holder.unwrap_or_else(|| "another process".to_owned());
        RunError::Busy { folder: folder.to_path_buf(), holder }
    };
    let mut gone = None;
    loop {
        let mut options = OpenOptions::new();
        let mut file = options.read(true).write(true).create(true).truncate(false).open(&path).map_err(io)?;
        let lock = match try_lock(&file) {
            Ok(()) => Ok(true),
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(e)) if no_locks(&e) => Err(e),
            Err(TryLockError::Error(e)) => return Err(io(e)),
        };
        // Whoever has just taken the lock may not have written its name yet.
        let before = Holder::read(&mut file);
        let age = age(&file);
        let said = || before.as_ref().map(|holder| holder.said(own, age));
        let elsewhere = before.as_ref().is_some_and(|holder| !holder.neighbour(own));
        match lock {
            // Taken over by another in the meantime.
            Ok(true) if !current(&file, &path) => continue,
            // Locks that do not reach its machine, or a process that died a moment ago: time tells which.
            Ok(true) if elsewhere && age < STALE => return Err(busy(said())),
            Ok(true) => {}
            // A file server may keep the lock of a machine that is gone for ever.
            Ok(false) if elsewhere && age >= STALE && remove(&path, own)? => {
                gone = before;
                continue;
            }
            Ok(false) => return Err(busy(said())),
            Err(_) if before.as_ref().is_some_and(|holder| holder.alive(own, age)) => {
                return Err(busy(said()));
            }
            Err(e) => warn!(
                "{}: this file system has no locks ({e}): two processes that begin at the same moment would both train the run",
                path.display()
            ),
        }
        if let Some(gone) = gone.or(before) {
            let since = if gone.neighbour(own) { String::new() } else { format!(" for {} s", age.as_secs()) };
            info!("{}: {gone} is gone{since}: taking its run over", folder.display());
        }
        let name = own.text();
        file.set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| file.write_all(name.as_bytes()))
            .map_err(io)?;
        return Ok(file);
    }
}

/// Removes the lock file of a holder that is gone, one process at a time: a second one must not remove what the first put in its
/// place. Says whether the way is free.
fn remove(path: &Path, own: &Holder) -> Result<bool, RunError> {
    let Some(runs) = path.parent().and_then(Path::parent) else { return Ok(false) };
    let guard = runs.join(".takeover");
    let mut options = OpenOptions::new();
    let open = options.read(true).write(true).create(true).truncate(false).open(&guard);
    let guard = open.map_err(RunError::io(&guard))?;
    if guard.try_lock().is_err() {
        return Ok(false);
    }
    let Ok(mut file) = File::open(path) else { return Ok(true) };
    let still = Holder::read(&mut file).is_some_and(|holder| !holder.neighbour(own)) && age(&file) >= STALE;
    if still {
        fs::remove_file(path).map_err(RunError::io(path))?;
    }
    Ok(true)
}

/// Whether a lock is still its holder's: its file is in its place and has its name.
fn mine(file: &mut File, path: &Path, own: &Holder) -> bool {
    current(file, path) && Holder::read(file).is_none_or(|holder| holder == *own)
}

/// Whether a file is the one at `path`. One that cannot be asked for (its folder was renamed) is no other.
fn current(file: &File, path: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let id = |about: fs::Metadata| (about.dev(), about.ino());
        match (file.metadata().map(id), fs::metadata(path).map(id)) {
            (Ok(ours), Ok(theirs)) => ours == theirs,
            _ => true,
        }
    }
    #[cfg(not(unix))]
    {
        let _ = (file, path);
        true
    }
}

fn no_locks(e: &io::Error) -> bool {
    e.kind() == ErrorKind::Unsupported || e.raw_os_error() == Some(NO_LOCKS)
}

/// The time since the last heartbeat; none where clocks differ so that it lies ahead.
fn age(file: &File) -> Duration {
    let beat = file.metadata().and_then(|about| about.modified());
    beat.ok().and_then(|beat| SystemTime::now().duration_since(beat).ok()).unwrap_or_default()
}

/// A process on a machine, told from all that ever had its number.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Holder {
    process: u32,
    host: String,
    /// The system's id of this start of the machine.
    boot: String,
    /// When the process began, in the system's ticks.
    started: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.as_str() {
            "" => write!(f, "process {}", self.process),
            host => write!(f, "process {} on {host}", self.process),
        }
    }
}

impl Holder {
    /// This process.
    fn this() -> &'static Self {
        static THIS: OnceLock<Holder> = OnceLock::new();
        THIS.get_or_init(|| {
            let line = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
            let host = std::env::var("TAPER_HOST").ok().filter(|host| !host.trim().is_empty());
            let host = host.unwrap_or_else(|| line("/proc/sys/kernel/hostname"));
            let process = std::process::id();
            Self {
                process,
                host: host.split_whitespace().collect::<Vec<_>>().join(" "),
                boot: line("/proc/sys/kernel/random/boot_id"),
                started: started(process).unwrap_or_default(),
            }
        })
    }

    fn text(&self) -> String {
        format!("{self}\nboot {}\nstarted {}\n", self.boot, self.started)
    }

    /// The name in a lock file; `None` in one that is free.
    fn read(file: &mut File) -> Option<Self> {
        let mut text = String::new();
        file.rewind().ok()?;
        file.take(1000).read_to_string(&mut text).ok()?;
        Self::parse(&text)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let name = lines.next()?.strip_prefix("process ")?;
        let (process, host) = name.split_once(" on ").unwrap_or((name, ""));
        let mut rest = |word: &str| {
            Some(lines.next()?.strip_prefix(word)?.trim().to_owned()).filter(|found| !found.is_empty())
        };
        Some(Self {
            process: process.parse().ok()?,
            host: host.to_owned(),
            boot: rest("boot").unwrap_or_default(),
            started: rest("started").unwrap_or_default(),
        })
    }

    /// Whether it is a process of the same machine, since it was last started; one that does not say since when counts as such.
    fn neighbour(&self, own: &Self) -> bool {
        self.host == own.host && (self.boot == own.boot || self.boot.is_empty())
    }

    /// Whether it lives, as far as that can be known without its lock.
    fn alive(&self, own: &Self, age: Duration) -> bool {
        match self.neighbour(own) && !own.started.is_empty() {
            true => started(self.process).is_some_and(|started| started == self.started),
            false => age < STALE,
        }
    }

    /// Its name in messages, with what a reader on another machine has to know.
    fn said(&self, own: &Self, age: Duration) -> String {
        match self.neighbour(own) {
            true => self.to_string(),
            false => format!(
                "{self} (last sign of life {} s ago; taken over after {} s without one)",
                age.as_secs(),
                STALE.as_secs()
            ),
        }
    }
}

/// When a process of this machine began; `None` if there is none of this number, or no way to ask.
fn started(process: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The second field is the program's name in brackets and may hold anything; this is the twenty-second.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    // A process that has ended and was not waited for holds nothing.
    let dead = fields.next()? == "Z";
    fields.nth(18).filter(|_| !dead).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    fn other(host: &str) -> Holder {
        Holder { process: 7, host: host.into(), boot: "another".into(), started: "1".into() }
    }

    /// A run's folder whose lock file names `holder`, with a heartbeat `age` ago.
    fn held(holder: &Holder, age: Duration) -> (TempDir, PathBuf, File) {
        let runs = tempfile::tempdir().unwrap();
        let folder = runs.path().join("run");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join(".lock"), holder.text()).unwrap();
        let file = File::options().read(true).write(true).open(folder.join(".lock")).unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
        (runs, folder, file)
    }

    fn attempt(folder: &Path) -> Result<File, RunError> {
        take(folder, Holder::this(), File::try_lock)
    }

    fn busy(result: Result<File, RunError>) -> String {
        match result {
            Err(RunError::Busy { holder, .. }) => holder,
            other => panic!("{other:?}"),
        }
    }

    const FRESH: Duration = Duration::from_secs(60);
    const OLD: Duration = Duration::from_secs(180);

    #[test]
    fn a_holder_elsewhere_keeps_its_run_while_it_gives_signs_of_life() {
        let (_runs, folder, file) = held(&other("far"), FRESH);
        let said = busy(attempt(&folder));
        assert!(said.starts_with("process 7 on far (last sign of life 6"), "{said}");
        assert!(holder(&folder).is_some_and(|said| said.contains("process 7 on far")));
        // The same where its lock is seen.
        file.lock().unwrap();
        busy(attempt(&folder));
        // A clock that goes ahead is a sign of life too.
        file.unlock().unwrap();
        file.set_modified(SystemTime::now() + OLD).unwrap();
        busy(attempt(&folder));
        assert_eq!(fs::read_to_string(folder.join(".lock")).unwrap(), other("far").text());
    }

    #[test]
    fn a_holder_elsewhere_without_a_sign_of_life_is_taken_over() {
        let (_runs, folder, mut file) = held(&other("far"), OLD);
        assert_eq!(holder(&folder), None);
        let mut taken = attempt(&folder).unwrap();
        assert!(mine(&mut taken, &folder.join(".lock"), Holder::this()));
        assert!(!mine(&mut file, &folder.join(".lock"), &other("far")), "it would notice");
    }

    #[test]
    fn a_lock_that_a_server_keeps_for_a_dead_machine_is_replaced() {
        let (_runs, folder, mut file) = held(&other("far"), OLD);
        file.lock().unwrap();
        let mut taken = attempt(&folder).unwrap();
        assert!(mine(&mut taken, &folder.join(".lock"), Holder::this()));
        assert!(!mine(&mut file, &folder.join(".lock"), &other("far")), "it would notice");
        // Whoever held a handle of the old file has no way in.
        file.unlock().unwrap();
        busy(attempt(&folder));
    }

    #[test]
    fn a_neighbour_is_judged_by_its_lock_however_old_its_heartbeat() {
        let neighbour = Holder { process: 7, started: "1".into(), ..Holder::this().clone() };
        let (_runs, folder, file) = held(&neighbour, OLD);
        file.lock().unwrap();
        assert_eq!(busy(attempt(&folder)), neighbour.to_string());
        file.unlock().unwrap();
        attempt(&folder).unwrap();
    }

    #[test]
    fn without_locks_the_process_and_the_heartbeat_decide() {
        let refused = |_: &File| Err(TryLockError::Error(io::Error::from_raw_os_error(NO_LOCKS)));
        let lockless = |folder: &Path| take(folder, Holder::this(), refused);
        let (_runs, folder, _) = held(&other("far"), FRESH);
        busy(lockless(&folder));
        let (_runs, folder, _) = held(&other("far"), OLD);
        lockless(&folder).unwrap();
        // A neighbour that lives, and one that had its number before.
        let (_runs, folder, _) = held(Holder::this(), OLD);
        busy(lockless(&folder));
        let (_runs, folder, _) = held(&Holder { started: "1".into(), ..Holder::this().clone() }, FRESH);
        lockless(&folder).unwrap();
    }

    #[test]
    fn names_read_back_and_older_ones_are_no_obstacle() {
        for holder in [Holder::this().clone(), other("a b"), other("")] {
            assert_eq!(Holder::parse(&holder.text()), Some(holder));
        }
        let old = Holder::parse("process 12 on vm").unwrap();
        assert_eq!((old.process, old.host.as_str(), old.boot.as_str()), (12, "vm", ""));
        for text in ["", "process", "process x on y", "\0\u{1}", "something else\nboot 1"] {
            assert_eq!(Holder::parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn mounts_whose_locks_stay_on_this_machine_are_known() {
        let mounts = "\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:50 / /home rw,relatime shared:2 - nfs files:/home rw,vers=3,nolock,local_lock=none
41 22 0:51 / /home/a\\040b rw - nfs4 files:/b rw,vers=4.2,local_lock=none
42 22 0:52 / /scratch rw - lustre mds@tcp:/s rw,localflock
43 22 0:53 / /old rw - nfs files:/old rw,vers=3,local_lock=all";
        let found = |path: &str| local_locks(mounts, Path::new(path));
        assert_eq!(found("/srv/runs"), None);
        assert_eq!(found("/home/runs").unwrap(), "/home (nfs) is mounted with `nolock`");
        assert_eq!(found("/home/a b/runs"), None);
        assert_eq!(found("/scratch").unwrap(), "/scratch (lustre) is mounted with `localflock`");
        assert!(found("/old/x").is_some());
        assert_eq!(local_locks("nonsense\n1 - 2", Path::new("/x")), None);
    }
}
