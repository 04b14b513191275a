//! The hub's parquet layout: PNG images with integer labels, or a column of sentences.
//!
//! Columns are read a slice of rows at a time and decoded in parallel into their place, so that memory holds the
//! decoded images and little else.
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use ::parquet::column::reader::get_typed_column_reader;
use ::parquet::data_type::{ByteArrayType, DataType, Int64Type};
use ::parquet::file::reader::{FileReader, SerializedFileReader};
use rayon::prelude::*;
use taper_files::open_regular;

use super::DataError;
use super::images::Shape;

/// Rows held undecoded at a time.
const SLICE: usize = 2048;

/// Decoded images and, for each label column asked for, the labels.
pub struct Labelled {
    /// The pixels of all images.
    pub pixels: Vec<u8>,
    /// One list a column.
    pub labels: Vec<Vec<u8>>,
}

/// The images and labels of a file. `image` is a struct column with the PNG in its field `bytes`.
pub fn images(path: &Path, image: &str, labels: &[&str], shape: Shape) -> Result<Labelled, DataError> {
    guard(path, || {
        let table = Table::open(path)?;
        let rows = table.rows;
        let mut found = Vec::new();
        for name in labels {
            let mut list = Vec::new();
            table.column::<Int64Type>(&[name], |slice| {
                for label in slice {
                    let byte = u8::try_from(*label).ok().filter(|l| usize::from(*l) < shape.classes);
                    let (classes, at) = (shape.classes, list.len());
                    let message = || {
                        format!("column `{name}`: expected labels below {classes}, found {label} at row {at}")
                    };
                    list.push(byte.ok_or_else(|| DataError::format(path, message()))?);
                }
                Ok(())
            })?;
            found.push(list);
        }
        let size = shape.image_bytes();
        let mut pixels = Vec::new();
        table.column::<ByteArrayType>(&[image, "bytes"], |slice| {
            let start = pixels.len();
            if start == 0 {
                // By now the label columns have borne out the number of rows.
                let short = |e| DataError::format(path, format!("no memory for {rows} images: {e}"));
                pixels.try_reserve_exact(rows.saturating_mul(size)).map_err(short)?;
            }
            pixels.resize(start + slice.len() * size, 0);
            let failed = pixels[start..].par_chunks_exact_mut(size).zip(slice).enumerate().find_map_first(
                |(i, (out, bytes))| {
                    decode_png(bytes.data(), shape, out).err().map(|message| (start / size + i, message))
                },
            );
            match failed {
                Some((row, message)) => Err(DataError::format(path, format!("row {row}: {message}"))),
                None => Ok(()),
            }
        })?;
        Ok(Labelled { pixels, labels: found })
    })
}

/// The texts of column `name`, in order.
pub fn sentences(path: &Path, name: &str) -> Result<Vec<String>, DataError> {
    guard(path, || {
        let mut lines = Vec::new();
        Table::open(path)?.column::<ByteArrayType>(&[name], |slice| {
            for bytes in slice {
                let text = std::str::from_utf8(bytes.data());
                let message = |e| format!("column `{name}`: row {} is not UTF-8: {e}", lines.len());
                lines.push(text.map_err(|e| DataError::format(path, message(e)))?.to_string());
            }
            Ok(())
        })?;
        Ok(lines)
    })
}

/// Turns a panic of the parquet reader, which damaged files can cause, into an error naming the file.
fn guard<T>(path: &Path, read: impl FnOnce() -> Result<T, DataError>) -> Result<T, DataError> {
    // Nothing outlives the closure but its result, so no broken state can be seen afterwards.
    catch_unwind(AssertUnwindSafe(read))
        .unwrap_or_else(|_| Err(DataError::format(path, "damaged: the parquet reader gave up on it")))
}

struct Table<'a> {
    path: &'a Path,
    reader: SerializedFileReader<File>,
    rows: usize,
}

impl<'a> Table<'a> {
    fn open(path: &'a Path) -> Result<Self, DataError> {
        let file = open_regular(path)?;
        let bytes = file.metadata().map_err(|e| DataError::io(path, e))?.len();
        let reader = SerializedFileReader::new(file)
            .map_err(|e| DataError::format(path, format!("not a readable parquet file: {e}")))?;
        let claimed = reader.metadata().file_metadata().num_rows();
        // An image or a sentence takes more than a byte.
        let possible = usize::try_from(claimed).ok().filter(|rows| *rows as u64 <= bytes);
        let message = || format!("the header claims {claimed} rows, the file cannot hold them");
        let rows = possible.ok_or_else(|| DataError::format(path, message()))?;
        Ok(Self { path, reader, rows })
    }

    /// Passes the values of a column to `take`, a slice at a time. A null, a list or another type is an error.
    fn column<T: DataType>(
        &self,
        name: &[&str],
        mut take: impl FnMut(&[T::T]) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let error = |message: String| DataError::format(self.path, message);
        let damaged = |e: ::parquet::errors::ParquetError| error(format!("column `{}`: {e}", name.join(".")));
        let schema = self.reader.metadata().file_metadata().schema_descr();
        let at = schema.columns().iter().position(|c| c.path().parts().iter().eq(name));
        let Some(at) = at else {
            let known: Vec<String> = schema.columns().iter().map(|c| c.path().string()).collect();
            return Err(error(format!("expected a column `{}`, found {}", name.join("."), known.join(", "))));
        };
        let column = schema.column(at);
        if column.max_rep_level() > 0 || column.physical_type() != T::get_physical_type() {
            let (name, wanted, found) = (name.join("."), T::get_physical_type(), column.physical_type());
            return Err(error(format!(
                "column `{name}`: expected one {wanted} a row, found {found} or a list"
            )));
        }
        let mut total = 0;
        let (mut levels, mut values) = (Vec::new(), Vec::with_capacity(SLICE));
        for group in 0..self.reader.num_row_groups() {
            let chunk =
                self.reader.get_row_group(group).and_then(|g| g.get_column_reader(at)).map_err(damaged)?;
            let mut chunk = get_typed_column_reader::<T>(chunk);
            loop {
                let (rows, present, _) = chunk
                    .read_records(SLICE - values.len(), Some(&mut levels), None, &mut values)
                    .map_err(damaged)?;
                total += rows;
                if present != rows {
                    return Err(error(format!(
                        "column `{}`: no value in one of the rows up to {total}",
                        name.join(".")
                    )));
                }
                if values.len() == SLICE {
                    take(&values)?;
                    values.clear();
                }
                if rows == 0 {
                    break;
                }
            }
            levels.clear();
        }
        if !values.is_empty() {
            take(&values)?;
        }
        if total != self.rows {
            return Err(error(format!(
                "column `{}`: expected {} rows, found {total}",
                name.join("."),
                self.rows
            )));
        }
        Ok(())
    }
}

/// Decodes a PNG of exactly `shape` into `out`.
fn decode_png(bytes: &[u8], shape: Shape, out: &mut [u8]) -> Result<(), String> {
    let mut decoder =
        png::Decoder::new_with_limits(std::io::Cursor::new(bytes), png::Limits { bytes: 1 << 20 });
    decoder.set_transformations(png::Transformations::EXPAND | png::Transformations::STRIP_16);
    let mut image = decoder.read_info().map_err(|e| format!("the image is not a readable PNG: {e}"))?;
    let (size, colour) = (image.info().size(), image.output_color_type().0);
    let expected = if shape.channels == 1 { png::ColorType::Grayscale } else { png::ColorType::Rgb };
    let (width, height) = (shape.width as u32, shape.height as u32);
    if size != (width, height) || colour != expected {
        let (w, h) = size;
        return Err(format!(
            "expected a {expected:?} image of {width}x{height}, found {colour:?} of {w}x{h}"
        ));
    }
    image.next_frame(out).map_err(|e| format!("the image is not a readable PNG: {e}"))?;
    Ok(())
}
