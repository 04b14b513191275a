//! What a run promises: the same bytes for any number of threads and however often it was killed, and no silent loss
//! when its files are damaged or cannot be written.
mod common;
mod compare;
mod faults;
mod identity;
mod interrupts;
mod kills;
mod outputs;
mod ranks;
mod seal;
mod threads;
mod verify;
