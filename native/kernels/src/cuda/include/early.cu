// Programmatic dependent launch: an early kernel may begin before the previous early kernels are done. Until it has
// waited for them it reads only weights, which none of these kernels writes.

// Waits for the kernels queued before this one.
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

// Idle blocks of long kernels sleep, so that blocks of the next kernel start on other multiprocessors. Several of those
// would start together on an empty multiprocessor, but one with a resident block has room for only one of them.
__device__ __forceinline__ void stay(bool lasting) {
#if __CUDA_ARCH__ >= 900
    wait_for_others();
    let_others_begin();
    for (int i = 0; i < 2 && lasting; ++i) __nanosleep(1000);
#endif
}
