// Copies to shared memory tracked by an mbarrier. Its phase, of parity 0 and 1 in turn, ends when the `arrivals` given
// at `open` have arrived and their copies have landed. From compute capability 8 on; `copy_box` and `copy_bytes` from 9
// on.

typedef unsigned long long Barrier;

__device__ __forceinline__ void open(Barrier* barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals) : "memory");
}

// The thread that opened barriers calls this before the block's next barrier, to make them visible to asynchronous
// copies.
__device__ __forceinline__ void opened() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void arrive(Barrier* barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(address(barrier)) : "memory");
}

__device__ __forceinline__ void wait(const Barrier* barrier, int parity) {
    int over;
    do {
#if __CUDA_ARCH__ >= 900
        asm volatile("{ .reg .pred over; mbarrier.try_wait.parity.shared.b64 over, [%1], %2; selp.b32 %0, 1, 0, over; }"
#else
        asm volatile("{ .reg .pred over; mbarrier.test_wait.parity.shared.b64 over, [%1], %2; selp.b32 %0, 1, 0, over; }"
#endif
                     : "=r"(over) : "r"(address(barrier)), "r"(parity) : "memory");
    } while (!over);
}

// One thread copies SIZE bytes, or writes zeros.
template <int SIZE>
__device__ __forceinline__ void copy_piece(void* to, const void* from, bool there) {
    if constexpr (SIZE == 2)
        *(unsigned short*)to = there ? *(const unsigned short*)from : 0;
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address(to)), "l"(from), "n"(SIZE),
                     "r"(there ? SIZE : 0) : "memory");
}

// Arrives once all of this thread's copies have landed.
template <int SIZE>
__device__ __forceinline__ void arrive_copied(Barrier* barrier) {
    if constexpr (SIZE == 2) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        arrive(barrier);
    } else {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address(barrier)) : "memory");
    }
}

#if __CUDA_ARCH__ >= 900
// Arrives, and makes the phase wait for `bytes` bytes of asynchronous copies.
__device__ __forceinline__ void expect(Barrier* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes) : "memory");
}

// Copies a box of a matrix that the host has described (a tensor map), from `element` of `row` on. Elements out of
// bounds become zeros. With ONCE the data is read only once and evicts nothing else from the cache.
template <bool ONCE>
__device__ __forceinline__ void copy_box(void* to, const void* matrix, int element, int row, Barrier* barrier) {
#define COPY_BOX "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    if constexpr (ONCE)
        asm volatile("{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0; "
                     COPY_BOX ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], first; }"
                     ::"r"(address(to)), "l"(matrix), "r"(element), "r"(row), "r"(address(barrier)) : "memory");
    else
        asm volatile(COPY_BOX " [%0], [%1, {%2, %3}], [%4];"
                     ::"r"(address(to)), "l"(matrix), "r"(element), "r"(row), "r"(address(barrier)) : "memory");
#undef COPY_BOX
}

// Copies a box of rows of a tensor of four dimensions.
__device__ __forceinline__ void copy_box(void* to, const void* tensor, int element, int row, int head, int batch,
                                         Barrier* barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];"
                 ::"r"(address(to)), "l"(tensor), "r"(element), "r"(row), "r"(head), "r"(batch), "r"(address(barrier))
                 : "memory");
}

// Copies contiguous bytes, in whole pieces of 16.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, unsigned bytes, Barrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(address(to)), "l"(from), "r"(bytes), "r"(address(barrier)) : "memory");
}

// Writes a word to the same place in another block of the cluster; that block's barrier counts its bytes.
__device__ __forceinline__ void send(unsigned* place, unsigned number, int block, Barrier* barrier) {
    asm volatile("{ .reg .b32 to, there; mapa.shared::cluster.u32 to, %0, %3; mapa.shared::cluster.u32 there, %2, %3; "
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %1, [there]; }"
                 ::"r"(address(place)), "r"(number), "r"(address(barrier)), "r"(block) : "memory");
}
#endif
