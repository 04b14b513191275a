//! A PNG or JPEG file as the pixels a network sees: decoded, grey or colour, of the size asked for.
//!
//! Integers from the first to the last step, so that the pixels are the same on every CPU. The filter is a triangle as wide as the
//! reduction (bilinear with anti-aliasing), in two passes with 22 bits of weight: what Pillow 13's
//! `resize(size, BILINEAR)` computes, byte for byte. Grey is ITU-R 601's luma as Pillow's `convert("L")` has it. Transparency,
//! colour profiles and a camera's note of its orientation are ignored.
use std::borrow::Cow;
use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use taper_files::read_regular;
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use super::DataError;

/// Bytes that an image's file may have.
pub const MOST_FILE: u64 = 1 << 28;

/// Rows and columns that an image may have.
pub const MOST_SIDE: usize = 1 << 15;

/// Pixels that an image may have: a small file can claim many.
pub const MOST_PIXELS: usize = 1 << 26;

/// The pixels of an image file: `height` × `width` × `channels` bytes, row by row, channels interleaved.
///
/// `channels` is 1 (grey) or 3. This is what the data set `folder` does to each of its files, for a program that shows a
/// trained network one more.
pub fn read(path: &Path, height: usize, width: usize, channels: usize) -> Result<Vec<u8>, DataError> {
    Ok(Photo::read(path)?.fitted(height, width, channels))
}

/// The endings of files that are taken for images where a folder holds other things too.
pub const ENDINGS: [&str; 3] = ["png", "jpg", "jpeg"];

/// The bytes of a PNG file of grey or colour pixels, as [`read`] returns them.
pub fn png(height: usize, width: usize, channels: usize, pixels: &[u8]) -> Result<Vec<u8>, String> {
    let colour = match channels {
        1 => png::ColorType::Grayscale,
        3 => png::ColorType::Rgb,
        n => return Err(format!("expected 1 or 3 channels for a PNG image, found {n}")),
    };
    let side = |n: usize| u32::try_from(n).map_err(|_| format!("{n} pixels are too many for a PNG image"));
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, side(width)?, side(height)?);
    encoder.set_color(colour);
    let write = |encoder: png::Encoder<'_, &mut Vec<u8>>| {
        let mut writer = encoder.write_header()?;
        writer.write_image_data(pixels)?;
        writer.finish()
    };
    write(encoder).map_err(|e| e.to_string())?;
    Ok(bytes)
}

/// A decoded image.
pub struct Photo {
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
    /// 1 for grey, 3 for RGB.
    channels: usize,
    pixels: Vec<u8>,
}

impl Photo {
    /// The image in a file.
    pub fn read(path: &Path) -> Result<Self, DataError> {
        let bytes = read_regular(path, MOST_FILE)?;
        Self::decode(&bytes).map_err(|message| DataError::format(path, message))
    }

    /// Decodes a file by its first bytes, whatever it is called. What is damaged or cut off is an error.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let decode = match bytes {
            [0x89, b'P', b'N', b'G', ..] => decode_png,
            [0xff, 0xd8, ..] => decode_jpeg,
            [] => return Err("expected a PNG or JPEG image, found an empty file".into()),
            _ => {
                let start = taper_files::hex(&bytes[..bytes.len().min(8)]);
                return Err(format!("expected a PNG or JPEG image, found a file that begins with {start}"));
            }
        };
        // Nothing outlives the closure but its result, so no broken state can be seen afterwards.
        catch_unwind(AssertUnwindSafe(|| decode(bytes)))
            .unwrap_or_else(|_| Err("damaged: the decoder gave up on it".into()))
    }

    /// The same image in so many rows, columns and channels (1 or 3).
    pub fn fitted(&self, height: usize, width: usize, channels: usize) -> Vec<u8> {
        let pixels = self.with_channels(channels);
        let rows = |pixels: Cow<'_, [u8]>| match width == self.width {
            true => pixels.into_owned(),
            false => resize_rows(&pixels, self.width, width, channels),
        };
        let columns = |pixels: Cow<'_, [u8]>, width: usize| match height == self.height {
            true => pixels.into_owned(),
            false => resize_columns(&pixels, self.height, height, width * channels),
        };
        // Where fewer rows leave less to do for the other pass, they are made first. Each pass rounds, so that the order shows.
        if height < self.height && height * self.width < self.height * width {
            rows(Cow::Owned(columns(pixels, self.width)))
        } else {
            columns(Cow::Owned(rows(pixels)), width)
        }
    }

    fn with_channels(&self, channels: usize) -> Cow<'_, [u8]> {
        let luma = |[r, g, b]: &[u8; 3]| {
            let weighted = 19595 * u32::from(*r) + 38470 * u32::from(*g) + 7471 * u32::from(*b);
            // The weights add up to 65536: no sum is above a byte.
            ((weighted + 0x8000) >> 16) as u8
        };
        match (self.channels, channels) {
            (1, 3) => Cow::Owned(self.pixels.iter().flat_map(|x| [*x; 3]).collect()),
            (3, 1) => Cow::Owned(self.pixels.as_chunks().0.iter().map(luma).collect()),
            _ => Cow::Borrowed(&self.pixels),
        }
    }
}

/// A buffer for an image of a size that was claimed, if anybody may have one.
fn buffer(width: usize, height: usize, bytes: usize) -> Result<Vec<u8>, String> {
    let pixels = width.saturating_mul(height);
    if width.max(height) > MOST_SIDE || pixels > MOST_PIXELS {
        return Err(format!(
            "expected an image of at most {MOST_SIDE} pixels a side and {MOST_PIXELS} in all, found {width}x{height}"
        ));
    }
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(bytes).map_err(|e| format!("no memory for {width}x{height} pixels: {e}"))?;
    buffer.resize(bytes, 0);
    Ok(buffer)
}

fn decode_png(bytes: &[u8]) -> Result<Photo, String> {
    let damaged = |e: png::DecodingError| format!("not a readable PNG: {e}");
    let mut decoder = png::Decoder::new(Cursor::new(bytes));
    decoder.set_transformations(png::Transformations::EXPAND | png::Transformations::STRIP_16);
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    let (width, height) = decoder.read_header_info().map_err(damaged)?.size();
    let (width, height) = (width as usize, height as usize);
    // Refused before the rest of the file is looked at.
    buffer(width, height, 0)?;
    let mut image = decoder.read_info().map_err(damaged)?;
    let stored = match image.output_color_type().0 {
        png::ColorType::Grayscale => 1,
        png::ColorType::GrayscaleAlpha => 2,
        png::ColorType::Rgba => 4,
        _ => 3,
    };
    let mut pixels = buffer(width, height, width * height * stored)?;
    image.next_frame(&mut pixels).map_err(damaged)?;
    image.finish().map_err(damaged)?;
    let (channels, pixels) = match stored {
        2 => (1, pixels.as_chunks::<2>().0.iter().map(|[grey, _]| *grey).collect()),
        4 => (3, pixels.as_chunks::<4>().0.iter().flat_map(|[r, g, b, _]| [*r, *g, *b]).collect()),
        channels => (channels, pixels),
    };
    Ok(Photo { height, width, channels, pixels })
}

fn decode_jpeg(bytes: &[u8]) -> Result<Photo, String> {
    let damaged = |e| format!("not a readable JPEG: {e}");
    // Without the decoder's vector code even where somebody else's feature has compiled it.
    let options = DecoderOptions::default()
        .set_strict_mode(true)
        .set_use_unsafe(false)
        .set_max_width(MOST_SIDE)
        .set_max_height(MOST_SIDE);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(damaged)?;
    let (width, height) = decoder.dimensions().unwrap_or_default();
    let (space, channels) = match decoder.input_colorspace() {
        Some(ColorSpace::Luma) => (ColorSpace::Luma, 1),
        _ => (ColorSpace::RGB, 3),
    };
    let mut pixels = buffer(width, height, width.saturating_mul(height).saturating_mul(channels))?;
    if !jpeg_ends(bytes) {
        return Err("not a readable JPEG: it is cut off before its end".into());
    }
    decoder.set_options(options.jpeg_set_out_colorspace(space));
    decoder.decode_into(&mut pixels).map_err(damaged)?;
    Ok(Photo { height, width, channels, pixels })
}

/// Whether the segments of a JPEG lead to its end marker. Decoders paint what is missing grey.
fn jpeg_ends(bytes: &[u8]) -> bool {
    let mut at = 2;
    while let Some(found) = bytes.get(at..).and_then(|rest| rest.iter().position(|b| *b == 0xff)) {
        at += found + 1;
        match bytes.get(at) {
            Some(0xd9) => return true,
            // A byte 255 of a scan, a restart, padding: no segment.
            Some(0x00 | 0x01 | 0xd0..=0xd8) => at += 1,
            Some(0xff) => {}
            Some(_) => match bytes.get(at + 1..at + 3) {
                Some([high, low]) => at += 1 + usize::from(u16::from_be_bytes([*high, *low])),
                _ => return false,
            },
            None => return false,
        }
    }
    false
}

/// Bits of a weight.
const BITS: u32 = 22;

/// What goes into one output: the first input and the weights from there on, which add up to 2²², nearly.
struct Window {
    first: usize,
    weights: Vec<i32>,
}

/// The windows of a line of `from` numbers made one of `to`: a triangle of the width of an output, at least of an input.
fn windows(from: usize, to: usize) -> Vec<Window> {
    let scale = from as f64 / to as f64;
    let width = scale.max(1.0);
    let window = |i: usize| {
        let centre = (i as f64 + 0.5) * scale;
        // A cast cuts off the fraction and makes 0 of what is below.
        let first = (centre - width + 0.5) as usize;
        let end = ((centre + width + 0.5) as usize).min(from);
        let inverse = 1.0 / width;
        let triangle = |x: usize| (1.0 - ((x as f64 - centre + 0.5) * inverse).abs()).max(0.0);
        let weights: Vec<f64> = (first..end).map(triangle).collect();
        let sum = weights.iter().fold(0.0, |sum, weight| sum + weight);
        let fixed = |weight: &f64| (0.5 + weight / sum * f64::from(1 << BITS)) as i32;
        Window { first, weights: weights.iter().map(fixed).collect() }
    };
    (0..to).map(window).collect()
}

/// The byte that a weighted sum stands for. It stays below 2³¹: a byte times weights of little more than 2²² in all.
fn rounded(sum: i32) -> u8 {
    ((sum + (1 << (BITS - 1))) >> BITS).clamp(0, 255) as u8
}

/// Every row of `from` pixels as one of `to`.
fn resize_rows(pixels: &[u8], from: usize, to: usize, channels: usize) -> Vec<u8> {
    let windows = windows(from, to);
    let mut out = Vec::with_capacity(pixels.len() / from * to);
    for row in pixels.chunks_exact(from * channels) {
        for Window { first, weights } in &windows {
            for channel in 0..channels {
                let inputs = row[first * channels + channel..].iter().step_by(channels);
                out.push(rounded(inputs.zip(weights).map(|(x, weight)| i32::from(*x) * weight).sum()));
            }
        }
    }
    out
}

/// `from` rows of `row` bytes as `to` of them.
fn resize_columns(pixels: &[u8], from: usize, to: usize, row: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(to * row);
    let mut sums = vec![0; row];
    for Window { first, weights } in windows(from, to) {
        sums.fill(0);
        for (inputs, weight) in pixels[first * row..].chunks_exact(row).zip(weights) {
            for (sum, x) in sums.iter_mut().zip(inputs) {
                *sum += i32::from(*x) * weight;
            }
        }
        out.extend(sums.iter().map(|sum| rounded(*sum)));
    }
    out
}
