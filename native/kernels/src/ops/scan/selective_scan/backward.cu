// The gradient of the selective scan, after common.cu and backward/*.cu. The formula is in backward.rs;
// cuda/backward.rs chooses the macros:
//   N       states of this launch           K, P   states per thread, threads per channel (K P >= N)
//   M       channels per thread             WARPS  warps per block
//   MIN     resident blocks of a multiprocessor, at least
//   CONSTANT_B, CONSTANT_C   B and C are (D, N) rather than shared by all channels of the block
//   RAGGED  whether some threads have padding channels
//   HAS_D, HAS_Z, HAS_BIAS, SOFTPLUS, CLAMP, MASK, DSTATES, SLABS   the call's inputs and options
//   CHUNKED whether time is cut into chunks that are independent until `compose`
//   ENDS    whether this is the first pass, forwards, for the states at the starts of tiles and at the ends of chunks; the
//           second one goes backwards
//
// A thread holds K states of M channels, and a warp 32 / P groups of such threads. Sums over the
// states of a channel and over channels are mostly sums in a thread; the rest are shuffles.
//
// The second pass processes tiles of TILE steps from the last to the first. In a tile it goes forwards once, and stores
// the states before every SUB steps in shared memory; then backwards: it recomputes SUB steps forwards with their
// intermediate values in registers, and goes back through them. Every decay is computed three times, which is cheaper
// than storing it.
//
// A chunk's first pass also computes the adjoint that it passes to the chunk before it: a[1] g[1] is the sum of a[1]
// ... a[t] v[t] over the steps, without an adjoint from later chunks, and can be summed forwards. `compose.cu` combines
// the states and adjoints of all chunks.
//
// Limits and history, f32 on an H200 (132 multiprocessors at 1.98 GHz), ms for B x L x D x N of
//                       32x60x512x16  1x2048x1536x16  8x2048x2048x16  8x2048x5120x16
//   bytes at 4.2 TB/s   0.0048        0.015           0.161           0.401
//   3 exp, 16 a clock/SM 0.0113       0.036           0.385           0.963
//   instructions, 38 a state and step (11.5 in pass 1, 26.5 in pass 2), 4 a clock and multiprocessor
//                       0.018         0.057           0.610           1.53
//   version 1           0.106         0.243           1.820           6.07
//     as above; addresses computed for every element, too few chunks
//   version 2           0.062         0.211           1.508           3.46
//     running pointers, sums that start from their first terms
//   version 3           0.065         0.189           1.274           3.40
//     loads of a tile's start together, prefetch of the next tile, better layouts
//   version 4           0.055         0.146         1.21            2.91
//     pass 2 computes decays between other work, ahead of their use; layouts that fill the device more evenly
// Pass 2 issued in 47% of all clocks in version 3, for its compiled code waited for each exponential on its own, and
// issues in 55% in version 4. Of 3.4 clocks a warp and instruction, 0.7 are fixed latencies, 0.5 the other warp's,
// 0.4 shared memory, exponentials and shuffles, and 0.3 global memory. There are no registers for more than two warps
// a scheduler.
// Tried without gain: decays ahead in pass 1 too (0.31 for 0.26 in the third shape: its three warps a scheduler hide
// them); with 128 registers and four warps a scheduler, two channels a thread (1.12 for 0.89 in pass 2: registers
// spill); a barrier that keeps exponentials after the use of the decays that they replace (0.94 for 0.91 in pass 2).
// In version 3: all shuffles of SUB steps together (1.67 for the third shape: registers spill); two channels a thread
// and three warps a scheduler, which is as fast; decays recomputed instead of stored, so that four warps a scheduler
// fit with two channels a thread (1.25) and three with four (1.51).

extern "C" __global__ void __launch_bounds__(THREADS, MIN) selective_scan_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(32) char memory[];
    Shared& shared = *(Shared*)memory;
    i64 run = blockIdx.x / (p.sections * p.section_blocks), j = p.first_chunk + run % p.some_chunks;
    run /= p.some_chunks;
#if ENDS
    Ends ends(p, shared, run, j);
    ends.run();
#else
    Gradients gradients(p, shared, j);
    i64 end = (run + 1) * p.batches < p.batch ? (run + 1) * p.batches : p.batch;
    for (i64 batch = run * p.batches; batch < end; batch++) gradients.one(batch);
    // `part_a` has the place of the adjoints that this block has read.
    gradients.leave(CHUNKED || PACKED ? j * p.batch + gradients.batch : run);
#endif
}
