//! Where NVIDIA's libraries may lie that we load ourselves.

use super::driver;
use std::path::PathBuf;

/// The file names of a library, best first. What is newer than the driver may not work with it, so it
/// comes last.
pub(super) fn names(library: &str, windows: impl Fn(u32) -> String) -> Vec<String> {
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

/// Where to look for these names, best first: the loader's own search, then toolkits, then Python's
/// packages.
pub(super) fn everywhere(names: &[String]) -> Vec<PathBuf> {
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

/// The library folders of NVIDIA's Python packages: `lib/python*/site-packages/nvidia/*/lib`, below
/// the active environment, the user's folder and the system's.
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
