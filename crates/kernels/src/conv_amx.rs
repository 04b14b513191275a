//! Convolution of bf16 by AMX, for any kernel, stride and padding.
//!
//! Images are taken in blocks and channels in panels of 32. One pixel of a block and a panel is a cell of 2 KB, which the registers load
//! as it lies; all cells of an operand are made first. A pixel of the result is a sum over the taps through which it sees cells, so
//! that nothing is gathered and no padding is multiplied; a gradient of weights is a sum over the pixels of a tap.
use super::conv::{Geometry, Pass};
use super::conv_direct::TASKS;
use super::simd::Into;
use super::simd::amx::{Amx, Operand, SIDE, block};
use super::{Buf, Shared, par, par_after};
use std::ops::Range;

/// Images of a block and channels of a panel.
const WIDE: usize = 2 * SIDE;
/// Elements of a cell, each a pair of bf16.
const CELL: usize = WIDE * SIDE;
/// Bytes of a row of registers, and of a cell.
const LINE: usize = 4 * SIDE;
const CELL_BYTES: usize = 4 * CELL;
/// Bytes of cells that a task passes over again and again: a part of an L2 cache.
const IN_L2: usize = 700 << 10;
/// Panels of both sides whose gradients of weights a task sums up.
const GROUP: usize = 2;

/// The rows of a cell, what they are pairs of, and how they lie.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cell {
    /// 32 images with pairs of channels, to be a left-hand side.
    Images,
    /// 32 channels with pairs of images, to be a left-hand side.
    Channels,
    /// 16 pairs of images of 32 channels, to be a right-hand side.
    Pairs,
}

/// Images `[n, h, w, c]` as cells: `[block][row][column][panel]`.
struct Cells<'a> {
    x: &'a [f32],
    n: usize,
    size: [usize; 2],
    c: usize,
    kind: Cell,
    cells: Buf<f32>,
}

impl<'a> Cells<'a> {
    /// Room for them; [`Cells::fill`] makes them.
    fn new(x: &'a [f32], n: usize, size: [usize; 2], c: usize, kind: Cell) -> Self {
        let count = n.div_ceil(WIDE) * size[0] * size[1] * c.div_ceil(WIDE);
        Self { x, n, size, c, kind, cells: Buf::dirty(count * CELL) }
    }

    fn panels(&self) -> usize {
        self.c.div_ceil(WIDE)
    }

    /// Rows of pixels of all blocks: each is a task of [`Cells::fill`].
    fn rows(&self) -> usize {
        self.n.div_ceil(WIDE) * self.size[0]
    }

    /// The cell of a panel of a pixel.
    fn at(&self, block: usize, [y, x]: [usize; 2], panel: usize) -> *const u8 {
        let pixel = (block * self.size[0] + y) * self.size[1] + x;
        self.cells.as_ptr().wrapping_add((pixel * self.panels() + panel) * CELL).cast()
    }

    /// Makes the cells of a row of pixels.
    ///
    /// # Safety
    /// `to` are the cells, and nobody else touches those of this row.
    unsafe fn fill(&self, _: Amx, row: usize, to: Shared<f32>) {
        let (height, width) = (self.size[0], self.size[1]);
        let (i0, image) = (row / height * WIDE, height * width * self.c);
        for x in 0..width {
            let pixel = i0 * image + (row % height * width + x) * self.c;
            for c0 in (0..self.c).step_by(WIDE) {
                let from = self.x[pixel + c0..].as_ptr();
                let (images, channels) = (self.n - i0, self.c - c0);
                let ((across, along), (rows, terms), down) = match self.kind {
                    Cell::Images => ((image, 1), (images, channels), false),
                    Cell::Channels => ((1, image), (channels, images), false),
                    Cell::Pairs => ((1, image), (channels, images), true),
                };
                // SAFETY: these images and channels are there, the cell is this row's, and `Amx` proves the instructions.
                unsafe {
                    let cell = to.at(((row * width + x) * self.panels() + c0 / WIDE) * CELL);
                    write_cell(cell, (from, across, along), (rows, terms), down);
                }
            }
        }
    }
}

/// Writes a cell of up to 32 × 32 elements, of which those beyond `size` are zero; see [`block`].
///
/// # Safety
/// As there, and the cell may be written.
unsafe fn write_cell(
    cell: *mut f32,
    (from, across, along): (*const f32, usize, usize),
    (rows, terms): (usize, usize),
    pairs_down: bool,
) {
    for half in [0, SIDE] {
        let size = (rows.saturating_sub(half).min(SIDE), terms.min(WIDE));
        let from = (from.wrapping_add(half * across), across, along);
        let (first, step) = if pairs_down { (half, WIDE) } else { (half * SIDE, SIDE) };
        // SAFETY: the caller's promise.
        unsafe { block(from, size, pairs_down, (cell.add(first), step, SIDE)) };
    }
}

/// What an axis of a target sees: for each of its positions the taps, and where they look.
type Sight = Vec<Vec<(usize, usize)>>;

fn sight(g: &Geometry, pass: Pass, axis: usize) -> Sight {
    let (input, output) = ([g.h, g.w][axis], [g.oh(), g.ow()][axis]);
    let (pad, stride) = (g.pad[axis], g.stride[axis]);
    let seen = |at: usize, tap: usize| match pass {
        Pass::Forward => (at * stride + tap).checked_sub(pad).filter(|source| *source < input),
        Pass::GradInput => {
            let from = (at + pad).checked_sub(tap).filter(|from| from % stride == 0)?;
            Some(from / stride).filter(|source| *source < output)
        }
    };
    let positions = if pass == Pass::Forward { output } else { input };
    (0..positions)
        .map(|at| (0..g.kernel[axis]).filter_map(|tap| Some((tap, seen(at, tap)?))).collect())
        .collect()
}

/// Whether it computes this shape.
pub fn fits(g: &Geometry) -> bool {
    g.groups == 1
}

/// y = x ∗ w, or the input gradient (then `x` is dy and `y` is dx); with `add`, y += it.
pub fn conv(amx: Amx, g: &Geometry, pass: Pass, (x, w): (&[f32], &[f32]), y: &mut [f32], add: bool) {
    let (output, input, taps) = ([g.oh(), g.ow()], [g.h, g.w], g.taps());
    // Strides in the weights between columns, which are channels of the target, and between terms.
    let ((source, k), (target, n), (across, along)) = match pass {
        Pass::Forward => ((input, g.ci), (output, g.co), (g.ci * taps, taps)),
        Pass::GradInput => ((output, g.co), (input, g.ci), (taps, g.ci * taps)),
    };
    let mut cells = Cells::new(x, g.n, source, k, Cell::Images);
    let (terms, panels, blocks) = (cells.panels(), n.div_ceil(WIDE), g.n.div_ceil(WIDE));
    // Right-hand sides: [panel of columns][tap][panel of terms].
    let mut weights = Buf::<f32>::dirty(panels * taps * terms * CELL);
    // A task passes over some rows once for each of its panels.
    let row = source[1] * terms * CELL_BYTES;
    let rows = (IN_L2 / row.max(1)).saturating_sub(g.kernel[0] - 1).clamp(1, target[0].max(1));
    let bands = target[0].div_ceil(rows);
    let parts = TASKS.div_ceil((blocks * bands).max(1)).clamp(1, panels.max(1));
    let wide = panels.div_ceil(parts);
    let parts = panels.div_ceil(wide.max(1));
    let (to_cells, to_weights) = (Shared::new(&mut cells.cells), Shared::new(&mut weights));
    let (cells, weights, y) = (&cells, &weights, Shared::new(y));
    let pack = |task: usize| {
        if let Some(row) = task.checked_sub(panels * taps) {
            // SAFETY: a task for each row of cells.
            return unsafe { cells.fill(amx, row, to_cells) };
        }
        let (n0, tap) = (task / taps * WIDE, task % taps);
        for k0 in (0..k).step_by(WIDE) {
            let from = w[n0 * across + k0 * along + tap..].as_ptr();
            // SAFETY: these columns and terms are there, and a task writes cells of its own.
            unsafe {
                let cell = to_weights.at((task * terms + k0 / WIDE) * CELL);
                write_cell(cell, (from, across, along), (n - n0, k - k0), true);
            }
        }
    };
    let (down, side) = (sight(g, pass, 0), sight(g, pass, 1));
    par_after(panels * taps + cells.rows(), pack, blocks * bands * parts, |task| {
        let (panel, band, block) = (task % parts * wide, task / parts % bands, task / parts / bands);
        let i0 = block * WIDE;
        amx.with_registers(|| {
            for panel in panel..panels.min(panel + wide) {
                for (oy, seen) in down.iter().enumerate().take((band + 1) * rows).skip(band * rows) {
                    for (ox, across) in side.iter().enumerate() {
                        let size = ((g.n - i0).min(WIDE), (n - panel * WIDE).min(WIDE));
                        let operands = seen.iter().flat_map(|&(a, iy)| {
                            across.iter().map(move |&(b, ix)| {
                                let tap = panel * taps + a * g.kernel[1] + b;
                                let w = weights.as_ptr().wrapping_add(tap * terms * CELL).cast();
                                (left(cells.at(block, [iy, ix], 0)), right(w))
                            })
                        });
                        let into = if add { Into::Add } else { Into::Set };
                        let image = target[0] * target[1] * n;
                        // SAFETY: all cells are made; a task writes blocks, rows or columns of its own.
                        unsafe {
                            let c = y.at(i0 * image + (oy * target[1] + ox) * n + panel * WIDE);
                            amx.product(size, terms, operands, (c, image), into);
                        }
                    }
                }
            }
        });
    });
}

/// A cell as a left-hand side, or some, one after another.
fn left(at: *const u8) -> Operand {
    Operand { at, row: LINE, second: SIDE * LINE, step: CELL_BYTES }
}

/// A cell as a right-hand side, or some, one after another.
fn right(at: *const u8) -> Operand {
    Operand { at, row: 2 * LINE, second: LINE, step: CELL_BYTES }
}

/// dw = the gradient of the weights: for each tap and pair of panels a sum over all pixels that the tap sees.
pub fn grad_weight(amx: Amx, g: &Geometry, (x, dy): (&[f32], &[f32]), dw: &mut [f32]) {
    let (k, n, taps) = (g.ci, g.co, g.taps());
    let mut input = Cells::new(x, g.n, [g.h, g.w], k, Cell::Pairs);
    let mut output = Cells::new(dy, g.n, [g.oh(), g.ow()], n, Cell::Channels);
    let (to_input, to_output) = (Shared::new(&mut input.cells), Shared::new(&mut output.cells));
    let (input, output) = (&input, &output);
    // Tasks have some panels of both sides, and a part of the rows of pixels of all blocks.
    let groups = [output.panels().div_ceil(GROUP), input.panels().div_ceil(GROUP)];
    let rows = output.rows();
    if rows == 0 {
        return dw.fill(0.0);
    }
    let length = rows.div_ceil((TASKS / 2).div_ceil((groups[0] * groups[1]).max(1)).clamp(1, rows));
    let parts = rows.div_ceil(length);
    let size = taps * n * k;
    let mut sums = Buf::<f32>::dirty(parts * size);
    let out = Shared::new(&mut sums);
    // Rows whose cells a task passes over for each tap.
    let row = GROUP * (g.ow() + g.w * g.stride[0]) * CELL_BYTES;
    let at_once = (IN_L2 / row.max(1)).max(1);
    let (down, side) = (sight(g, Pass::Forward, 0), sight(g, Pass::Forward, 1));
    let fill = |row: usize| {
        // SAFETY: a task for each row of cells of one of the two.
        unsafe {
            match row.checked_sub(input.rows()) {
                None => input.fill(amx, row, to_input),
                Some(row) => output.fill(amx, row, to_output),
            }
        }
    };
    let panels = |group: usize, all: usize| group * GROUP..all.min((group + 1) * GROUP);
    par_after(input.rows() + output.rows(), fill, parts * groups[0] * groups[1], |task| {
        let (part, group) = (task / (groups[0] * groups[1]), task % (groups[0] * groups[1]));
        let (across, along) =
            (panels(group / groups[1], output.panels()), panels(group % groups[1], input.panels()));
        let all = part * length..rows.min((part + 1) * length);
        amx.with_registers(|| {
            for first in all.clone().step_by(at_once) {
                let into = if first > all.start { Into::Add } else { Into::Set };
                let some = first..all.end.min(first + at_once);
                for tap in 0..taps {
                    for o in across.clone() {
                        for i in along.clone() {
                            let seen = pixels(&some, g, (&down, &side), tap);
                            let operands = seen.map(|(block, from, to)| {
                                (left(output.at(block, from, o)), right(input.at(block, to, i)))
                            });
                            let cell = ((n - o * WIDE).min(WIDE), (k - i * WIDE).min(WIDE));
                            // SAFETY: all cells are made; a task sums up a part or panels of its own.
                            unsafe {
                                let c = out.at(part * size + (tap * n + o * WIDE) * k + i * WIDE);
                                amx.product(cell, 1, operands, (c, k), into);
                            }
                        }
                    }
                }
            }
        });
    });
    let (sums, dw) = (&*sums, Shared::new(dw));
    par(n, |o| {
        // SAFETY: every task writes an output channel of its own.
        let dw = unsafe { dw.slice(o * k * taps, k * taps) };
        for tap in 0..taps {
            let row = |part: usize| &sums[part * size + (tap * n + o) * k..][..k];
            for (i, dw) in dw[tap..].iter_mut().step_by(taps).enumerate() {
                *dw = (1..parts).fold(row(0)[i], |sum, part| sum + row(part)[i]);
            }
        }
    });
}

/// For some rows of output pixels of all blocks, the pixels that see something through a tap: the block, the pixel, and what it sees.
fn pixels<'a>(
    rows: &Range<usize>,
    g: &Geometry,
    (down, side): (&'a Sight, &'a Sight),
    tap: usize,
) -> impl Iterator<Item = (usize, [usize; 2], [usize; 2])> + use<'a> {
    let (height, [a, b]) = (g.oh(), [tap / g.kernel[1], tap % g.kernel[1]]);
    let through =
        |seen: &[(usize, usize)], tap: usize| seen.iter().find(|(t, _)| *t == tap).map(|(_, at)| *at);
    rows.clone().flat_map(move |row| {
        let (block, oy) = (row / height, row % height);
        let iy = through(&down[oy], a);
        let columns = side.iter().enumerate().filter_map(move |(ox, seen)| Some((ox, through(seen, b)?)));
        iy.into_iter().flat_map(move |iy| columns.clone().map(move |(ox, ix)| (block, [oy, ox], [iy, ix])))
    })
}
