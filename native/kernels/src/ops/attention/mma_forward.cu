// Attention of 16-bit storage without mask and bias on tensor cores, after common.cu, mma.cu
// and softmax.cu, as in FlashAttention-2 (Dao 2023).
//
// A block owns OWN queries of a head. The values of a tile are loaded while its scores are computed, and the next keys
// while these values are summed. Scores are exponents of 2: log2(e) is part of the scale. With a causal mask, fully
// masked tiles are skipped, and only tiles on the diagonal are masked element by element.
//
// History, bf16 on an H200, TFLOP/s at 4x16x4096x64 and 2x32x8192x128, causal ones in brackets:
//   FlashAttention-2 of PyTorch 2.11   300 (265)   363 (337)
//   version 1                          271 (264)   317 (319)
//     32 rows a warp, 64 keys a tile: 4 products for each 16 x 16 tile that is loaded

extern "C" __global__ void __launch_bounds__(THREADS, MIN) attention_mma(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    STORAGE* q = (STORAGE*)memory;
    STORAGE* k = q + OWN * LEADING;
    STORAGE* v = k + OTHER * LEADING;

    Place at = place(p, blockIdx.x, p.heads, true);
    int row = at.tile * OWN, key_head = at.head / (p.heads / p.key_heads);
    Matrix queries = {p.q + start(p.q_at, at.batch, at.head), p.q_at.row, p.queries, p.width};
    Matrix keys = {p.k + start(p.k_at, at.batch, key_head), p.k_at.row, p.keys, p.width};
    Matrix values = {p.v + start(p.v_at, at.batch, key_head), p.v_at.row, p.keys, p.value_width};
    int end = visible(p, least(row + OWN, p.queries) - 1), whole = visible(p, row) / OTHER * OTHER;

    int warp_row = threadIdx.x / 32 * 16 * TILES;
    unsigned own = left_at<LEADING>(q + warp_row * LEADING);
    unsigned other = right_at<LEADING>(k), weighted = turned_at<VALUE_LEADING>(v);
    row += warp_row;

    Sums sums[TILES][VALUE_WIDTH / 8];
    clear(sums);
    Softmax state;
    begin(state);
    if (end > 0) {
        fetch<OWN, WIDTH, LEADING, THREADS>(q, queries, at.tile * OWN, 0);
        fetch<OTHER, WIDTH, LEADING, THREADS>(k, keys, 0, 0);
        end_group();
    }
#pragma unroll 1
    for (int first = 0; first < end; first += OTHER) {
        wait_groups<0>();
        __syncthreads();
        fetch<OTHER, VALUE_WIDTH, VALUE_LEADING, THREADS>(v, values, first, 0);
        end_group();
        Sums s[TILES][OTHER / 8];
        clear(s);
        add_products<OTHER, WIDTH, LEADING>(s, own, other);
        if (first < whole) weigh<false>(s, state, p, row, first);
        else weigh<true>(s, state, p, row, first);
        fade(sums, state);
        Left weights[TILES][OTHER / 16];
        round<OTHER>(weights, s);
        wait_groups<0>();
        __syncthreads();
        if (first + OTHER < end) fetch<OTHER, WIDTH, LEADING, THREADS>(k, keys, first + OTHER, 0);
        end_group();
        add_weighted<VALUE_WIDTH, OTHER, VALUE_LEADING>(sums, weights, weighted);
    }
    finish(p, at, row, sums, state);
}
