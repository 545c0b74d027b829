//! The floating-point mode of a thread.

/// While this value lives, its thread computes with denormal numbers. XLA's threads flush them to 0, ours do not, and a
/// result must not depend on the thread that computes it.
pub struct Strict(Mode);

#[cfg(target_arch = "x86_64")]
type Mode = u32;
#[cfg(target_arch = "aarch64")]
type Mode = u64;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
type Mode = ();

impl Strict {
    /// Saves the thread's mode and enables denormal numbers.
    pub fn new() -> Strict {
        let before = mode();
        set(strict(before));
        Strict(before)
    }
}

impl Drop for Strict {
    fn drop(&mut self) {
        set(self.0);
    }
}

#[cfg(target_arch = "x86_64")]
fn mode() -> Mode {
    let mut mode = 0;
    // SAFETY: writes the register's four bytes.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut mode, options(nostack)) };
    mode
}

#[cfg(target_arch = "x86_64")]
fn strict(mode: Mode) -> Mode {
    // Clears "flush to zero" and "denormals are zeros".
    mode & !0x8040
}

#[cfg(target_arch = "x86_64")]
fn set(mode: Mode) {
    // SAFETY: reads four bytes; the value differs from the register's earlier one only in bits that may have any value.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const mode, options(nostack, readonly)) };
}

#[cfg(target_arch = "aarch64")]
fn mode() -> Mode {
    let mode;
    // SAFETY: reads a register.
    unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) mode, options(nomem, nostack)) };
    mode
}

#[cfg(target_arch = "aarch64")]
fn strict(mode: Mode) -> Mode {
    // Clears "flush to zero".
    mode & !(1 << 24)
}

#[cfg(target_arch = "aarch64")]
fn set(mode: Mode) {
    // SAFETY: the value differs from the register's earlier one only in a bit that may have any value.
    unsafe { std::arch::asm!("msr fpcr, {}", in(reg) mode, options(nomem, nostack)) };
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn mode() {}
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn strict((): ()) {}
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn set((): ()) {}
