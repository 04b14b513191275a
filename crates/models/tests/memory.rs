//! What a training step really takes of memory, by the system's allocator: nothing that an op could forget to count.
//!
//! A process of its own, for no other test may allocate meanwhile.
use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use taper_models::{Mode, Params, Registry, Task};

/// The system's allocator, with what is in use and the most that ever was.
struct Counted;

static USED: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

fn more(bytes: usize) {
    let used = USED.fetch_add(bytes, Ordering::Relaxed) + bytes;
    MOST.fetch_max(used, Ordering::Relaxed);
}

// SAFETY: every call is handed to the system's allocator as it came.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        more(layout.size());
        // SAFETY: the caller's promises are those the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        more(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        more(size);
        USED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(ptr, layout, size) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        USED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

/// Bytes in use after the forward pass of a step, and the most during the step, beyond what there was before it.
fn step(name: &str, config: &Value, time: usize) -> [usize; 2] {
    let images = name == "vit";
    let (task, input, target) = match images {
        true => (
            Task::Images { height: 4, width: 4 * (time - 1), channels: 1, classes: 2 },
            Tensor::zeros((1, 4, 4 * (time - 1), 1), DType::F32, &Device::Cpu).unwrap(),
            Tensor::zeros(1, DType::U32, &Device::Cpu).unwrap(),
        ),
        false => {
            let tokens = Tensor::zeros((time, 1), DType::U32, &Device::Cpu).unwrap();
            (Task::Tokens { vocab: 7 }, tokens.clone(), tokens)
        }
    };
    let vb = Params::new(0).builder(DType::F32, &Device::Cpu);
    let mut model = Registry::builtin().get(name).unwrap().build(config, task, vb).unwrap();
    let before = USED.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let loss = model.loss(&input, &target, Mode::Train { seed: 0, step: 0 }).unwrap();
    let kept = USED.load(Ordering::Relaxed).saturating_sub(before);
    let grads = taper_models::backward(&loss.total).unwrap();
    drop((grads, loss));
    [kept, MOST.load(Ordering::Relaxed) - before]
}

#[test]
fn a_step_takes_memory_by_the_length_of_a_sequence_and_not_by_its_square() {
    const TOKENS: usize = 2048;
    for (name, config) in [
        ("gpt", json!({"layers": 1, "heads": 2, "emb": 8, "block": TOKENS, "dropout": {"attention": 0.1}})),
        ("llama", json!({"layers": 1, "heads": 2, "kv_heads": 1, "emb": 8, "block": TOKENS})),
        ("vit", json!({"layers": 1, "heads": 2, "emb": 8})),
    ] {
        // Threads and their workspaces are there after a short step. Buffers of before may serve again, but none of them holds pairs
        // of so many tokens.
        step(name, &config, 64);
        let taken = step(name, &config, TOKENS);
        eprintln!("{name}: {taken:?} bytes of {TOKENS} tokens");
        // A byte for each pair of tokens, as the smallest matrix of pairs would have: one head's mask of what is dropped.
        assert!(taken.into_iter().all(|bytes| bytes < TOKENS * TOKENS), "{name}: {taken:?}");
    }
}
