//! Arrays by name from numpy's `.npz` and from safetensors files.
//!
//! An `.npz` is a zip archive of `.npy` members, stored or deflated. The archive's directory is read by the zip crate and deflate by
//! flate2; the header of a member, a line of Python's, is read here: the crates that do so bring an array type or a
//! parser of Python literals with them. No member is unpickled, whatever it says.
use std::collections::BTreeMap;
use std::io::{Cursor, Read};
use std::path::Path;

use flate2::Crc;
use flate2::read::DeflateDecoder;
use safetensors::{Dtype, SafeTensors};
use taper_files::read_regular;
use zip::{CompressionMethod, ZipArchive};

use super::DataError;
use super::files::MOST_BYTES;

/// Members that an archive may have.
const MOST_MEMBERS: usize = 1000;

/// Axes that an array may have.
const MOST_AXES: usize = 8;

/// What the numbers of an array are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// A yes or no, of one byte.
    Bool,
    /// Signed, of so many bytes.
    Signed(usize),
    /// Unsigned, of so many bytes.
    Unsigned(usize),
    /// A float of so many bytes: 4 or 8.
    Float(usize),
}

impl Element {
    fn bytes(self) -> usize {
        match self {
            Self::Bool => 1,
            Self::Signed(bytes) | Self::Unsigned(bytes) | Self::Float(bytes) => bytes,
        }
    }
}

impl std::fmt::Display for Element {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Bool => write!(f, "bool"),
            Self::Signed(bytes) => write!(f, "int{}", 8 * bytes),
            Self::Unsigned(bytes) => write!(f, "uint{}", 8 * bytes),
            Self::Float(bytes) => write!(f, "float{}", 8 * bytes),
        }
    }
}

/// An array of plain numbers, the last axis fastest, little-endian.
pub struct Array {
    /// What its numbers are.
    pub element: Element,
    /// Its axes.
    pub dims: Vec<usize>,
    bytes: Vec<u8>,
}

impl Array {
    /// Its bytes, if it is of unsigned bytes.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// Its numbers as f32, if they are floats; those of double precision rounded to nearest.
    pub fn floats(&self) -> Vec<f32> {
        match self.element {
            Element::Float(8) => {
                self.bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes) as f32).collect()
            }
            _ => self.bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
        }
    }

    /// Its numbers, if they are whole; those that do not fit an i64 at its end.
    pub fn integers(&self) -> Vec<i64> {
        let size = self.element.bytes();
        let signed = matches!(self.element, Element::Signed(_));
        let number = |bytes: &[u8]| {
            let mut wide = [0; 8];
            wide[..size].copy_from_slice(bytes);
            let unsigned = u64::from_le_bytes(wide);
            if signed {
                // The sign bit moves to the top and back, so that it fills what is above it.
                let above = 64 - 8 * size as u32;
                ((unsigned << above) as i64) >> above
            } else {
                i64::try_from(unsigned).unwrap_or(i64::MAX)
            }
        };
        self.bytes.chunks_exact(size).map(number).collect()
    }
}

/// The arrays of a file, read when they are asked for.
pub struct Arrays<'a> {
    path: &'a Path,
    bytes: Vec<u8>,
    /// Members of an archive by the names of their arrays; `None` for safetensors.
    members: Option<BTreeMap<String, usize>>,
}

impl<'a> Arrays<'a> {
    /// Opens a file by its first bytes, whatever it is called.
    pub fn open(path: &'a Path) -> Result<Self, DataError> {
        let bytes = read_regular(path, MOST_BYTES)?;
        let members = match bytes.get(..4) {
            Some(b"PK\x03\x04") => {
                Some(directory(&bytes).map_err(|message| DataError::format(path, message))?)
            }
            _ => {
                SafeTensors::deserialize(&bytes).map_err(|e| {
                    let message = format!("expected an .npz or a safetensors file, found neither: {e}");
                    DataError::format(path, message)
                })?;
                None
            }
        };
        Ok(Self { path, bytes, members })
    }

    /// The names of all arrays.
    pub fn names(&self) -> Vec<String> {
        match &self.members {
            Some(members) => members.keys().cloned().collect(),
            None => {
                let mut names: Vec<String> = SafeTensors::deserialize(&self.bytes)
                    .map(|tensors| tensors.names().into_iter().map(str::to_owned).collect())
                    .unwrap_or_default();
                names.sort();
                names
            }
        }
    }

    /// The array of this name.
    pub fn get(&self, name: &str) -> Result<Array, DataError> {
        let found = match &self.members {
            Some(members) => match members.get(name) {
                Some(member) => self.member(*member),
                None => Err("there is no such array".into()),
            },
            None => self.tensor(name),
        };
        found.map_err(|message| DataError::format(self.path, format!("array `{name}`: {message}")))
    }

    fn tensor(&self, name: &str) -> Result<Array, String> {
        let tensors = SafeTensors::deserialize(&self.bytes).map_err(|e| e.to_string())?;
        let tensor = tensors.tensor(name).map_err(|e| e.to_string())?;
        let element = match tensor.dtype() {
            Dtype::BOOL => Element::Bool,
            Dtype::I8 => Element::Signed(1),
            Dtype::I16 => Element::Signed(2),
            Dtype::I32 => Element::Signed(4),
            Dtype::I64 => Element::Signed(8),
            Dtype::U8 => Element::Unsigned(1),
            Dtype::U16 => Element::Unsigned(2),
            Dtype::U32 => Element::Unsigned(4),
            Dtype::U64 => Element::Unsigned(8),
            Dtype::F32 => Element::Float(4),
            Dtype::F64 => Element::Float(8),
            other => return Err(format!("expected integers, float32 or float64, found {other:?}")),
        };
        Ok(Array { element, dims: tensor.shape().to_vec(), bytes: tensor.data().to_vec() })
    }

    /// One member of an archive, inflated and checked against its sum.
    fn member(&self, number: usize) -> Result<Array, String> {
        let damaged = |e: zip::result::ZipError| format!("not a readable archive: {e}");
        let mut archive = ZipArchive::new(Cursor::new(&self.bytes)).map_err(damaged)?;
        let member = archive.by_index_raw(number).map_err(damaged)?;
        if member.encrypted() {
            return Err("expected an open archive, found an encrypted one".into());
        }
        let (packed, crc) = (member.compressed_size(), member.crc32());
        match member.compression() {
            CompressionMethod::Stored => npy(member, packed, crc),
            // Deflate cannot expand more than 1032 times, so a claim beyond that is false before anything is allocated.
            CompressionMethod::DEFLATE => npy(DeflateDecoder::new(member), packed.saturating_mul(1032), crc),
            other => Err(format!("expected it stored or deflated, as numpy does, found {other:?}")),
        }
    }
}

/// The members of an archive that numpy would call arrays.
fn directory(bytes: &[u8]) -> Result<BTreeMap<String, usize>, String> {
    let damaged = |e: zip::result::ZipError| format!("not a readable archive: {e}");
    let mut archive = ZipArchive::new(Cursor::new(bytes)).map_err(damaged)?;
    if archive.len() > MOST_MEMBERS {
        return Err(format!("expected at most {MOST_MEMBERS} arrays, found {}", archive.len()));
    }
    let mut members = BTreeMap::new();
    for number in 0..archive.len() {
        let member = archive.by_index_raw(number).map_err(damaged)?;
        let name = member.name().map_err(damaged)?;
        if let Some(array) = name.strip_suffix(".npy")
            && members.insert(array.to_owned(), number).is_some()
        {
            return Err(format!("expected every array once, found `{array}` twice"));
        }
    }
    Ok(members)
}

/// A reader that sums what goes through it.
struct Summed<R> {
    inner: R,
    crc: Crc,
}

impl<R: Read> Read for Summed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.crc.update(&buffer[..n]);
        Ok(n)
    }
}

/// The array of an `.npy` file, which cannot have more than `most` bytes and must have the sum `crc`.
fn npy(reader: impl Read, most: u64, crc: u32) -> Result<Array, String> {
    let mut reader = Summed { inner: reader, crc: Crc::new() };
    let broken = |e: std::io::Error| format!("could not be read: {e}");
    let mut start = [0; 8];
    reader.read_exact(&mut start).map_err(broken)?;
    let [magic @ .., major, _] = start;
    if magic != *b"\x93NUMPY" {
        return Err(format!("expected an .npy header, found {}", taper_files::hex(&start)));
    }
    let length = if major == 1 {
        let mut length = [0; 2];
        reader.read_exact(&mut length).map_err(broken)?;
        u64::from(u16::from_le_bytes(length))
    } else {
        let mut length = [0; 4];
        reader.read_exact(&mut length).map_err(broken)?;
        u64::from(u32::from_le_bytes(length))
    };
    // Numpy itself reads no header above this without being told that the file is trusted.
    if length > 10_000 {
        return Err(format!("expected a header of at most 10000 bytes, found {length}"));
    }
    let mut header = vec![0; length as usize];
    reader.read_exact(&mut header).map_err(broken)?;
    let header = String::from_utf8_lossy(&header);
    let Header { element, swapped, fortran, dims } = Header::parse(&header)?;
    let claimed = dims.iter().try_fold(element.bytes() as u64, |bytes, dim| bytes.checked_mul(*dim as u64));
    let Some(claimed) = claimed.filter(|claimed| *claimed <= most.min(MOST_BYTES)) else {
        return Err(format!("the header claims an array of {dims:?}, the file cannot hold it"));
    };
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(claimed as usize).map_err(|e| format!("{claimed} bytes: {e}"))?;
    (&mut reader).take(claimed).read_to_end(&mut bytes).map_err(broken)?;
    // One byte more shows the end, and lets the decoder look at its own.
    let rest = (&mut reader).take(1).read_to_end(&mut Vec::new()).map_err(broken)?;
    if bytes.len() as u64 != claimed || rest > 0 {
        let found = if rest > 0 { "more".into() } else { bytes.len().to_string() };
        return Err(format!("expected {claimed} bytes after the header, found {found}"));
    }
    if reader.crc.sum() != crc {
        return Err(format!("damaged: its sum is {:08x}, the archive says {crc:08x}", reader.crc.sum()));
    }
    if swapped {
        bytes.chunks_exact_mut(element.bytes()).for_each(<[u8]>::reverse);
    }
    if fortran {
        bytes = last_axis_fastest(&bytes, &dims, element.bytes());
    }
    Ok(Array { element, dims, bytes })
}

/// An array whose first axis is the fastest in the other order.
fn last_axis_fastest(bytes: &[u8], dims: &[usize], size: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    let mut place = vec![0; dims.len()];
    for _ in 0..bytes.len() / size {
        let at = place.iter().zip(dims).rev().fold(0, |at, (i, dim)| at * dim + i);
        out.extend(&bytes[at * size..][..size]);
        for (i, dim) in place.iter_mut().zip(dims).rev() {
            *i += 1;
            if *i < *dim {
                break;
            }
            *i = 0;
        }
    }
    out
}

/// What the header of an `.npy` file says: `{'descr': '<f4', 'fortran_order': False, 'shape': (60000, 28, 28), }`.
struct Header {
    element: Element,
    swapped: bool,
    fortran: bool,
    dims: Vec<usize>,
}

impl Header {
    fn parse(text: &str) -> Result<Self, String> {
        let after = |key: &str| {
            let found = text.split_once(&format!("'{key}':")).map(|(_, rest)| rest.trim_start());
            found.ok_or_else(|| format!("expected '{key}' in the header, found {}", text.trim_end()))
        };
        let descr = after("descr")?;
        let quoted = descr.strip_prefix('\'').and_then(|rest| rest.split_once('\''));
        let Some((descr, _)) = quoted else {
            return Err("expected an array of plain numbers, found one of records".into());
        };
        let (order, kind) = descr.split_at_checked(1).unwrap_or_default();
        let (kind, size) = kind.split_at_checked(1).unwrap_or_default();
        let element = match (kind, size) {
            ("b", "1") => Element::Bool,
            ("i", "1" | "2" | "4" | "8") => Element::Signed(size.parse().unwrap_or(8)),
            ("u", "1" | "2" | "4" | "8") => Element::Unsigned(size.parse().unwrap_or(8)),
            ("f", "4") => Element::Float(4),
            ("f", "8") => Element::Float(8),
            ("O", _) => {
                return Err("expected plain numbers, found Python objects, which are not unpickled".into());
            }
            _ => {
                return Err(format!(
                    "expected integers, float32 or float64, found '{descr}': convert it with .astype('float32')"
                ));
            }
        };
        let swapped = match order {
            "<" | "|" | "=" => false,
            ">" => true,
            _ => return Err(format!("expected a byte order of < or >, found '{descr}'")),
        };
        let fortran = match after("fortran_order")? {
            order if order.starts_with("False") => false,
            order if order.starts_with("True") => true,
            other => {
                return Err(format!("expected a fortran_order of True or False, found {}", other.trim_end()));
            }
        };
        let shape = after("shape")?;
        let inside = shape.strip_prefix('(').and_then(|rest| rest.split_once(')')).map(|(inside, _)| inside);
        let wrong = || format!("expected a shape like (10, 28, 28), found {}", shape.trim_end());
        let axes = inside.ok_or_else(wrong)?.split(',').map(str::trim).filter(|axis| !axis.is_empty());
        let dims: Vec<usize> =
            axes.map(|axis| axis.parse().map_err(|_| wrong())).collect::<Result<_, _>>()?;
        if dims.len() > MOST_AXES {
            return Err(format!("expected at most {MOST_AXES} axes, found {}", dims.len()));
        }
        Ok(Self { element, swapped, fortran, dims })
    }
}
