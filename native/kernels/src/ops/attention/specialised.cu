// Shared by kernels of attention with specialised warps, after pipeline.cu, common.cu, mma.cu and wgmma.cu: one thread
// of a block copies tiles into stages of shared memory, and warpgroups consume them.

constexpr int PRODUCERS = 128;

// The stage of a tile, and the parity of its phase.
template <int COUNT>
struct Turn {
    int stage, parity;

    __device__ __forceinline__ Turn next() const {
        return stage + 1 == COUNT ? Turn{0, parity ^ 1} : Turn{stage + 1, parity};
    }
};

// Copies TALL rows of a head from `row` on, of which COLUMNS columns. The map fills up with zeros.
template <int TALL, int COLUMNS>
__device__ __forceinline__ void copy_tile(STORAGE* to, const TensorMap& from, int row, int head, int batch, Barrier* full) {
    expect(full, TALL * COLUMNS * 2);
#pragma unroll
    for (int column = 0; column < COLUMNS; column += 64)
        copy_box(to + column * TALL, &from, column, row, head, batch, full);
}

// Each warp frees a stage by itself, once its products have been waited for and all lanes have read what they need.
__device__ __forceinline__ void release(Barrier* free) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(free);
}

// The same for a stage that the warp has written.
__device__ __forceinline__ void publish(Barrier* full) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    release(full);
}

// Barriers by which warpgroups take turns: a warpgroup waits at its own, and arrives at that of the next one.
__device__ __forceinline__ void await_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
__device__ __forceinline__ void give_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(1 + group) : "memory"); }
