//! Writes of many elements of an array with one system call, BPF_MAP_UPDATE_BATCH, which aya 0.14
//! lacks: a change of one endpoint writes the whole list of its Service.

use std::{
    io,
    marker::PhantomData,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    sync::Once,
};

use anyhow::{Context, Result, ensure};
use aya::{
    Ebpf, Pod,
    maps::{Array, Map, MapData, MapError},
};
use tracing::debug;

use super::reader::MapInfo;
use crate::dataplane::sys::{self, Batch, command};

/// The number of elements below which they are written one by one: for a batch the kernel first
/// allocates memory for a key and a value (`generic_map_update_batch`).
const FEW: usize = 4;

/// A descriptor of an array of the packet path, for batches, in addition to that of aya.
#[derive(Debug)]
pub struct Rows<V> {
    fd: OwnedFd,
    value: PhantomData<V>,
}

impl<V: Pod> Rows<V> {
    /// Returns the array of this name within a loaded object.
    pub fn of(object: &Ebpf, name: &str) -> Result<Self> {
        let Some(Map::Array(data)) = object.map(name) else {
            anyhow::bail!("the packet path has no array {name}")
        };
        // The descriptor is copied, because opening the map by its number needs CAP_SYS_ADMIN.
        let fd = data.fd().as_fd().try_clone_to_owned().context("no descriptor is free")?;
        let info: MapInfo = sys::info(&fd).with_context(|| format!("{name} is not understood"))?;
        let sizes = (info.key as usize, info.value as usize);
        ensure!(sizes == (size_of::<u32>(), size_of::<V>()), "elements of {name} are other ones: {sizes:?}");
        Ok(Self { fd, value: PhantomData })
    }

    /// Writes consecutive elements, starting at index `first`. If the kernel refuses the batch,
    /// they are written one by one into `array`, which must be the same map.
    pub fn write(&self, array: &mut Array<MapData, V>, first: u32, values: &[V]) -> Result<(), MapError> {
        let one = |(index, value): (u32, &V)| array.set(index, value, 0);
        write(first, values, |values| self.batch(first, values), one)
    }

    fn batch(&self, first: u32, values: &[V]) -> io::Result<()> {
        let count = u32::try_from(values.len()).map_err(io::Error::other)?;
        let end = first.checked_add(count).ok_or(io::ErrorKind::InvalidInput)?;
        let indices: Vec<u32> = (first..end).collect();
        let mut batch = Batch {
            keys: indices.as_ptr() as u64,
            values: values.as_ptr() as u64,
            count,
            fd: self.fd.as_raw_fd().cast_unsigned(),
            ..Batch::default()
        };
        // SAFETY: there are as many indices and values as stated, each as long as the map's, and
        // they outlive the call.
        unsafe { sys::call(command::MAP_UPDATE_BATCH, &mut batch) }.map(drop)
    }
}

/// Writes all elements as one batch, or one by one if that fails; elements that the batch has
/// written are then written again.
fn write<V, E>(
    first: u32,
    values: &[V],
    batch: impl FnOnce(&[V]) -> io::Result<()>,
    one: impl FnMut((u32, &V)) -> Result<(), E>,
) -> Result<(), E> {
    static SAID: Once = Once::new();
    if values.len() >= FEW {
        match batch(values) {
            Ok(()) => return Ok(()),
            Err(error) => SAID.call_once(|| debug!("no batch: elements are written one by one: {error}")),
        }
    }
    (first..).zip(values).try_for_each(one)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn what_no_batch_takes_is_written_one_by_one() {
        let written = |count: u32, taken: bool| {
            let (batches, ones) = (RefCell::new(0), RefCell::new(Vec::new()));
            let values: Vec<u32> = (0..count).map(|value| value * 10).collect();
            let batch = |_: &[u32]| {
                *batches.borrow_mut() += 1;
                if taken { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EINVAL)) }
            };
            write(7, &values, batch, |(index, value)| {
                ones.borrow_mut().push((index, *value));
                Ok::<_, ()>(())
            })
            .unwrap();
            (batches.take(), ones.take())
        };
        assert_eq!(written(5, true), (1, vec![]));
        assert_eq!(written(5, false), (1, vec![(7, 0), (8, 10), (9, 20), (10, 30), (11, 40)]));
        assert_eq!(written(2, true), (0, vec![(7, 0), (8, 10)]), "few");
        assert_eq!(write(0, &[1], |_| Ok(()), |_| Err(())), Err(()));
    }
}
