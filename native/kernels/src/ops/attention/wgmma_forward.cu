// Attention of 16-bit storage without mask and bias on Hopper's tensor cores, after common.cu, mma.cu, softmax.cu and
// wgmma.cu, for packed sequences, and for few keys of narrow rows; specialised_forward.cu computes all other calls.
//
// A warpgroup owns 64 queries. The softmax of a tile of keys overlaps with the product of the previous tile's values;
// tiles are loaded one step ahead, with two tiles of keys and two of values in shared memory.
//
// History, bf16 on an H200, TFLOP/s at 4x16x4096x64 and 2x32x8192x128, causal ones in brackets:
//   cuDNN, by PyTorch 2.11             482 (416)   687 (639)
//   mma_forward.cu                     271 (264)   317 (319)
//   version 1, 128 keys a tile         297 (261)   398 (396)
//   version 2, 64 keys a tile          341 (319)   424 (402)
//     small sums leave room for 16 warps a multiprocessor at width 64, 12 at 128
// Tried without gain: one warpgroup per block, without waits for others, reads keys too often (321 at width 64).

extern "C" __global__ void __launch_bounds__(THREADS, MIN) attention_wgmma(Params p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    STORAGE* q = (STORAGE*)memory;
    STORAGE* k = q + OWN * WIDTH;
    STORAGE* v = k + 2 * OTHER * WIDTH;

    Place at = place(p, blockIdx.x, p.heads, true);
    int row = at.tile * OWN, key_head = at.head / (p.heads / p.key_heads);
    Matrix queries = {p.q + start(p.q_at, at.batch, at.head), p.q_at.row, p.queries, p.width};
    Matrix keys = {p.k + start(p.k_at, at.batch, key_head), p.k_at.row, p.keys, p.width};
    Matrix values = {p.v + start(p.v_at, at.batch, key_head), p.v_at.row, p.keys, p.value_width};
    int end = visible(p, least(row + OWN, p.queries) - 1), whole = visible(p, row) / OTHER * OTHER;
    int tiles = (end + OTHER - 1) / OTHER;

    Sums sums[TILES][VALUE_WIDTH / 8], s[TILES][OTHER / 8];
    Left x[TILES][OTHER / 16];
    Softmax state;
    clear(sums);
    begin(state);
    if (tiles) {
        fetch_swizzled<OWN, WIDTH>(q, queries, row);
        fetch_swizzled<OTHER, WIDTH>(k, keys, 0);
        end_group();
    }
    row += threadIdx.x / 32 * 16;
    if (tiles) {
        all_arrived();
        start_products<OWN, OTHER, WIDTH>(s, q, k);
        if (tiles > 1) fetch_swizzled<OTHER, WIDTH>(k + OTHER * WIDTH, keys, OTHER);
        fetch_swizzled<OTHER, VALUE_WIDTH>(v, values, 0);
        end_group();
        settle<0>();
        touch(s);
        if (whole) weigh<false>(s, state, p, row, 0);
        else weigh<true>(s, state, p, row, 0);
        round<OTHER>(x, s);
    }
#pragma unroll 1
    for (int tile = 1; tile < tiles; ++tile) {
        int first = tile * OTHER;
        all_arrived();
        start_products<OWN, OTHER, WIDTH>(s, q, k + tile % 2 * OTHER * WIDTH);
        start_weighted<VALUE_WIDTH, OTHER>(sums, x, v + (tile + 1) % 2 * OTHER * VALUE_WIDTH);
        if (tile + 1 < tiles) fetch_swizzled<OTHER, WIDTH>(k + (tile + 1) % 2 * OTHER * WIDTH, keys, first + OTHER);
        fetch_swizzled<OTHER, VALUE_WIDTH>(v + tile % 2 * OTHER * VALUE_WIDTH, values, first);
        end_group();
        settle<1>();
        touch(s);
        if (first < whole) weigh<false>(s, state, p, row, first);
        else weigh<true>(s, state, p, row, first);
        settle<0>();
        touch(sums);
        touch(x);
        fade(sums, state);
        round<OTHER>(x, s);
    }
    if (tiles) {
        all_arrived();
        start_weighted<VALUE_WIDTH, OTHER>(sums, x, v + (tiles + 1) % 2 * OTHER * VALUE_WIDTH);
        settle<0>();
        touch(sums);
    }
    finish(p, at, row, sums, state);
}
