//! Tables of constants that kernels read repeatedly.

use super::buffer::Buffer;
use super::device::Device;
use crate::error::Result;
use crate::tensor::{DType, Spec};
use std::sync::{Arc, Mutex, PoisonError};

/// Number of tables kept: each takes some kilobytes, and a model has one or two.
const KEPT: usize = 16;

/// The most recently requested tables, the latest at the end.
#[derive(Default)]
pub struct Tables(Mutex<Vec<(Vec<f64>, Arc<Buffer>)>>);

impl Tables {
    /// The table of these values, uploaded if it is missing. Every lane may read it at once.
    pub fn get(&self, device: &Device, values: &[f64]) -> Result<Arc<Buffer>> {
        let mut kept = self.kept();
        let entry = match kept.iter().position(|(of, _)| of == values) {
            Some(at) => kept.remove(at),
            None => (values.to_vec(), Arc::new(uploaded(device, values)?)),
        };
        let table = entry.1.clone();
        if kept.len() == KEPT {
            kept.remove(0);
        }
        kept.push(entry);
        Ok(table)
    }

    /// Drops the tables. Memory is freed once its last reader is done.
    pub fn clear(&self) {
        self.kept().clear();
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Vec<(Vec<f64>, Arc<Buffer>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn uploaded(device: &Device, values: &[f64]) -> Result<Buffer> {
    let buffer = Buffer::new(device, Spec::new(DType::F64, &[values.len()])?)?;
    let lane = device.lane()?;
    lane.upload(bytemuck::cast_slice(values), &buffer)?;
    lane.synchronize()?;
    Ok(buffer)
}
