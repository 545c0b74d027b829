// Copies to shared memory that are under way while a thread goes on.

__device__ __forceinline__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all of a thread's own but the latest LEFT groups.
template <int LEFT>
__device__ __forceinline__ void copied() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
