//! Files are synced by a thread of their own while the run goes on: a checkpoint takes the disk as long as hundreds of small
//! steps take the processor.
use super::RunError;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

/// Who writes checkpoints: one at a time, in their order.
#[derive(Default)]
pub(super) struct Writer(Option<JoinHandle<Result<(), RunError>>>);

impl Writer {
    /// Begins with `work` when what was begun before is done; an error of that is returned.
    pub fn begin<W>(&mut self, work: W) -> Result<(), RunError>
    where
        W: FnOnce() -> Result<(), RunError> + Send + 'static,
    {
        self.finish()?;
        let work = Arc::new(Mutex::new(Some(work)));
        let do_it = |work: &Mutex<Option<W>>| {
            let work = work.lock().unwrap_or_else(PoisonError::into_inner).take();
            work.map_or(Ok(()), |work| work())
        };
        let theirs = work.clone();
        match Builder::new().name("taper-checkpoint".into()).spawn(move || do_it(&theirs)) {
            Ok(thread) => self.0 = Some(thread),
            // Where no thread can be had, it is done here.
            Err(_) => do_it(&work)?,
        }
        Ok(())
    }

    /// The error of what is done already; does not wait.
    pub fn look(&mut self) -> Result<(), RunError> {
        if self.0.as_ref().is_some_and(JoinHandle::is_finished) { self.finish() } else { Ok(()) }
    }

    /// Waits for what was begun.
    pub fn finish(&mut self) -> Result<(), RunError> {
        match self.0.take() {
            Some(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            None => Ok(()),
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // A run that ends by another error still holds its lock until nothing of it is written any more.
        drop(self.0.take().map(JoinHandle::join));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    fn failure() -> RunError {
        RunError::Interrupted { step: 7 }
    }

    #[test]
    fn what_is_begun_is_done_in_order_and_its_errors_are_told() {
        let (sender, receiver) = channel();
        let mut writer = Writer::default();
        for number in 0..5 {
            let sender = sender.clone();
            writer
                .begin(move || {
                    sender.send(number).unwrap_or_default();
                    Ok(())
                })
                .unwrap();
        }
        writer.finish().unwrap();
        assert_eq!(receiver.try_iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        writer.begin(|| Err(failure())).unwrap();
        assert!(writer.begin(|| unreachable!()).is_err(), "the error of the one before");
        writer.finish().unwrap();
    }

    #[test]
    fn a_look_does_not_wait() {
        let (sender, receiver) = channel::<()>();
        let mut writer = Writer::default();
        writer
            .begin(move || {
                let _ = receiver.recv();
                Err(failure())
            })
            .unwrap();
        writer.look().unwrap();
        drop(sender);
        assert!(writer.finish().is_err());
        writer.look().unwrap();
    }
}
