//! Finds NVIDIA's libraries, which are loaded at run time.

use super::driver;
use crate::error::{Error, Kind, Result};
use std::path::{Path, PathBuf};

/// A library that is loaded at run time.
pub(in crate::cuda) struct Library {
    /// What it is, for messages.
    pub what: &'static str,
    /// Its name on Linux, without the prefix `lib` and the suffix `.so` with the version.
    pub name: &'static str,
    /// The name of its file on Windows, by the major version of CUDA.
    pub windows: fn(u32) -> String,
    /// The Python package that ships it.
    pub package: &'static str,
    /// The environment variable that holds its path.
    pub variable: &'static str,
}

impl Library {
    /// Calls `load` on each candidate file and returns its first result.
    pub fn load<T>(&self, load: impl Fn(&Path) -> Option<T>) -> Result<T> {
        let candidates = self.candidates();
        candidates.iter().find_map(|path| load(path)).ok_or_else(|| {
            let tried: Vec<_> = candidates.iter().map(|path| path.display().to_string()).collect();
            let Library { package, variable, .. } = self;
            Error::new(Kind::Unavailable, self.what)
                .expected(format_args!("one of {}", tried.join(", ")))
                .got("no such library")
                .hint(format_args!(
                    "Install the CUDA toolkit or `pip install {package}`, or set {variable} to the library's path"
                ))
        })
    }

    /// The files to try: only that of the environment variable, if it is set.
    fn candidates(&self) -> Vec<PathBuf> {
        match std::env::var_os(self.variable) {
            Some(path) => vec![path.into()],
            None => everywhere(&names(self.name, self.windows)),
        }
    }
}

/// The file names of a library, best first. A library newer than the driver may not work with it, so it comes last.
fn names(library: &str, windows: fn(u32) -> String) -> Vec<String> {
    let mut majors = [13, 12];
    if driver::ready().and_then(|()| driver::version()).is_ok_and(|(major, _)| major < 13) {
        majors.reverse();
    }
    if cfg!(windows) {
        return majors.map(windows).to_vec();
    }
    let mut names: Vec<String> = majors.iter().map(|major| format!("lib{library}.so.{major}")).collect();
    names.push(format!("lib{library}.so"));
    names
}

/// The candidate paths for these names, best first: the loader's own search, then toolkits, then Python packages.
fn everywhere(names: &[String]) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = names.iter().map(PathBuf::from).collect();
    for folder in toolkits().into_iter().chain(python_packages()) {
        found.extend(names.iter().map(|name| folder.join(name)).filter(|path| path.exists()));
    }
    found
}

fn toolkits() -> Vec<PathBuf> {
    let homes = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(std::env::var_os).map(PathBuf::from);
    let homes = homes.chain([PathBuf::from("/usr/local/cuda"), PathBuf::from("/opt/cuda")]);
    homes.flat_map(|home| ["lib64", "lib", "targets/x86_64-linux/lib", "bin"].map(|sub| home.join(sub))).collect()
}

/// The library folders of NVIDIA's Python packages: `lib/python*/site-packages/nvidia/*/lib` under the active
/// environment, the user's folder and the system's.
fn python_packages() -> Vec<PathBuf> {
    let prefixes = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(std::env::var_os).map(PathBuf::from);
    let user = std::env::home_dir().map(|home| home.join(".local"));
    let prefixes = prefixes.chain(user).chain([PathBuf::from("/usr/local"), PathBuf::from("/usr")]);
    let below = |folder: PathBuf| folder.read_dir().into_iter().flatten().flatten().map(|entry| entry.path());
    prefixes
        .flat_map(|prefix| below(prefix.join("lib")))
        .flat_map(|python| ["site-packages", "dist-packages"].map(|sub| python.join(sub).join("nvidia")))
        .flat_map(below)
        .map(|package| package.join("lib"))
        .collect()
}
