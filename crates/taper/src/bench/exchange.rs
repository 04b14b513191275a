//! The exchange of a step: gradients of 21 million numbers, those of ResNet-34, added up by ranks on this machine.
use super::{BenchError, Case, Make, Prepared, Work};
use std::time::Duration;
use taper_world::{Tree, World};

/// The parameters of ResNet-34.
pub const NUMBERS: usize = 21_282_122;

/// Bytes that copying all numbers twice reads and writes.
const TWO_COPIES: f64 = 4.0 * 4.0 * NUMBERS as f64 / 1e9;

pub fn cases() -> Vec<Case> {
    let case = |ranks: usize| Case {
        name: format!("exchange/{ranks}"),
        unit: "GB/s",
        amount: TWO_COPIES,
        repeat: 1,
        prepare: Box::new(move || {
            let copy: Make = Box::new(|| Ok(copies()));
            Ok(Prepared { ours: exchange(ranks)?, beside: vec![("copying twice", TWO_COPIES, copy)] })
        }),
        peer: None,
    };
    [2, 3, 4, 6].into_iter().map(case).collect()
}

fn copies() -> Work {
    let (from, mut first, mut second) = (vec![0f32; NUMBERS], vec![0f32; NUMBERS], vec![0f32; NUMBERS]);
    Box::new(move || {
        first.copy_from_slice(&from);
        second.copy_from_slice(std::hint::black_box(&first));
        std::hint::black_box(&mut second);
        Ok(())
    })
}

/// All ranks are threads of this process, and talk as processes do.
fn exchange(ranks: usize) -> Result<Work, BenchError> {
    fn refuse(e: impl std::fmt::Display) -> BenchError {
        BenchError::Side { side: "exchange", message: e.to_string() }
    }
    let worlds = taper_world::sockets::within(ranks, Duration::from_secs(60)).map_err(refuse)?;
    let tree = Tree::full(ranks);
    // What a sum came to is what the next one starts from: zeros stay zeros.
    let mut parts: Vec<(World, Vec<Vec<f32>>)> =
        worlds.into_iter().map(|world| (world, vec![vec![0.0; NUMBERS]])).collect();
    Ok(Box::new(move || {
        std::thread::scope(|scope| {
            let ranks: Vec<_> = parts
                .iter_mut()
                .map(|(world, mine)| {
                    let tree = &tree;
                    scope.spawn(move || {
                        *mine = vec![world.sum(tree, std::mem::take(mine), NUMBERS)?];
                        Ok(())
                    })
                })
                .collect();
            ranks.into_iter().try_for_each(|rank| {
                let gone = |_| Err(taper_world::Error::new(0, "a thread ended early"));
                rank.join().unwrap_or_else(gone).map_err(refuse)
            })
        })
    }))
}
