// Rounds the sums that specialised_backward.cu computes to dq, after common.cu, mma.cu and parts_of_dq.cu. A tile whose
// queries see no keys has no sums.

extern "C" __global__ void __launch_bounds__(128) attention_dq(const __grid_constant__ Gradients all) {
    const Params& p = all.of;
    int tiles = (p.queries + OTHER - 1) / OTHER, group = blockIdx.x % 2, first = blockIdx.x / 2 % tiles * OTHER;
    unsigned head = blockIdx.x / 2 / tiles;
    const float4* from = (const float4*)(all.sums + (i64)blockIdx.x * PART) + threadIdx.x;
    Sums sums[8] = {};
    if (visible(p, least(first + OTHER, p.queries) - 1) > 0)
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            float4 four = from[n * 128];
            sums[n][0] = four.x, sums[n][1] = four.y, sums[n][2] = four.z, sums[n][3] = four.w;
        }
    int row = first + QUERY_PART * group * 64 + threadIdx.x / 32 * 16, column = KEY_PART * group * 64;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int query = row + sum_row(0, half);
        if (query >= p.queries) continue;
        STORAGE* to = p.dq + start(p.q_at, head / p.heads, head % p.heads) + query * p.q_at.row + column;
        store_row<64>(to, sums, half, p.scale * (float)(1 / LOG2_E), p.width - column);
    }
}
