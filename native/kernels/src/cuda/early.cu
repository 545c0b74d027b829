// What kernels do that begin early, before those ahead of them are done: until then they read nothing but weights.

// Waits for the kernels before this one.
__device__ __forceinline__ void wait_for_others() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whoever says so has waited, or began when nobody wrote weights any more: others read them when they begin.
__device__ __forceinline__ void let_others_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
