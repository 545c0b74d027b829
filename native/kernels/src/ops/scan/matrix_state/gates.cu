// dg, from its value after each chunk, the sum of p.products, and the suffix sums of p.changes within the chunk. A warp
// for each chunk of a head.

extern "C" __global__ void matrix_state_gates(Params p) {
    i64 id = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (id >= (i64)p.batch * p.heads * p.chunks) return;
    i64 head = id / p.chunks, first = id % p.chunks * CHUNK;
    int lane = threadIdx.x % 32;
    REAL after = 0;
#if DELTA
    for (int i = 0; i < p.products_each; i++) after += p.products[id * p.products_each + i];
#else
    i64 slice = (i64)p.batch * p.heads * p.chunks;
    for (int i = 0; i < p.slices; i++)
        for (int key = lane; key < p.keys; key += 32) after += p.products[(i * slice + id) * p.keys + key];
#pragma unroll
    for (int distance = 16; distance; distance /= 2) after += __shfl_xor_sync(~0u, after, distance);
#endif
#pragma unroll
    for (int part = CHUNK - 32; part >= 0; part -= 32) {
        i64 t = first + part + lane;
        i64 step = (head / p.heads * p.length + t) * p.heads + head % p.heads;
        REAL sum = t < p.length ? p.changes[step] : (REAL)0;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            REAL later = __shfl_down_sync(~0u, sum, distance);
            if (lane + distance < 32) sum += later;
        }
        sum += after;
        if (t < p.length) p.dg[step] = sum;
        after = __shfl_sync(~0u, sum, 0);
    }
}
