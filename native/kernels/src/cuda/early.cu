// What kernels do that begin early, behind others of their sort that are not done yet: until then they read nothing but
// weights, which none of them writes.

// Waits for the kernels before this one.
__device__ __forceinline__ void wait_for_others() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_others_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// For blocks of threads that have nothing to do, of kernels that last long enough: while they nap, blocks of the next kernel
// begin. These would crowd on a multiprocessor that is empty, but beside another block there is room for one.
__device__ __forceinline__ void stay(bool lasting) {
#if __CUDA_ARCH__ >= 900
    wait_for_others();
    let_others_begin();
    for (int i = 0; i < 2 && lasting; ++i) __nanosleep(1000);
#endif
}
