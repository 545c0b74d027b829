//! Devices, their memory and kernels, and lanes, on which work is queued.

pub(super) mod buffer;
pub(super) mod device;
pub(super) mod devices;
pub(super) mod event;
pub(super) mod graph;
mod guest;
pub(super) mod kernel;
pub(super) mod lane;
pub(super) mod launch;
mod memory;
pub(super) mod params;
pub(super) mod staging;
mod tables;
pub(super) mod tensor_map;
pub(super) mod together;
