//! A line in a terminal: braille dots, two beside each other and four above each other in a character.

/// Draws `values`, evenly spread from left to right, on a grid of characters whose bottom is `low` and whose top is `high`: the rows,
/// top first. Values outside are drawn on the edge; those that are not finite are left out.
///
/// ```
/// let rise: Vec<f64> = (0..8).map(f64::from).collect();
/// assert_eq!(taper_figures::plot::braille(&rise, (0.0, 7.0), 4, 2), ["  ⡠⠊", "⡠⠊  "]);
/// ```
pub fn braille(values: &[f64], (low, high): (f64, f64), width: usize, height: usize) -> Vec<String> {
    let (columns, rows) = (2 * width, 4 * height);
    let mut dots = vec![vec![false; columns]; rows];
    let place = |column: usize| -> Option<usize> {
        // The value whose share of the width the middle of the column is in.
        let value = *values.get((2 * column + 1) * values.len() / (2 * columns))?;
        let share = ((value - low) / (high - low)).clamp(0.0, 1.0);
        share.is_finite().then(|| rows - 1 - (share * (rows - 1) as f64).round() as usize)
    };
    let mut before: Option<usize> = None;
    for column in 0..columns {
        let here = place(column);
        if let Some(here) = here {
            // A jump is a line straight up or down.
            let from = before.map_or(here, |before| match before.cmp(&here) {
                std::cmp::Ordering::Less => before + 1,
                std::cmp::Ordering::Equal => here,
                std::cmp::Ordering::Greater => before - 1,
            });
            dots[from.min(here)..=from.max(here)].iter_mut().for_each(|row| row[column] = true);
        }
        before = here;
    }
    dots.chunks(4).map(|rows| (0..width).map(|at| character(rows, 2 * at)).collect()).collect()
}

/// Eight dots as one character.
fn character(rows: &[Vec<bool>], column: usize) -> char {
    const BITS: [[u32; 2]; 4] = [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]];
    let bits = rows.iter().zip(BITS).flat_map(|(row, bits)| {
        bits.into_iter().enumerate().filter(move |(side, _)| row[column + side]).map(|(_, bit)| bit)
    });
    match bits.sum::<u32>() {
        0 => ' ',
        bits => char::from_u32(0x2800 + bits).unwrap_or(' '),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jump_is_a_line_and_what_is_no_number_is_left_out() {
        let values = [1.0, 1.0, 0.0, f64::NAN];
        assert_eq!(braille(&values, (0.0, 1.0), 2, 1), ["⠉⡆"]);
        assert_eq!(braille(&[], (0.0, 1.0), 2, 1), ["  "]);
        assert_eq!(braille(&[3.0], (3.0, 3.0), 1, 1), [" "]);
    }
}
