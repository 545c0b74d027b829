// The gradients of attention of 16-bit storage without mask and bias on Hopper's tensor cores, after common.cu, mma.cu,
// wgmma.cu and gradients.cu. Computing P overlaps with the product dP, and computing dS with the product of P.

constexpr int STAGE = OTHER * (WIDTH + VALUE_WIDTH);

__device__ __forceinline__ void bring(STORAGE* to, float* facts, const Params& p, const Work& work, int head, int first) {
    Sides from = work.others(p, head);
    fetch_swizzled<OTHER, WIDTH>(to, from.side, first);
    fetch_swizzled<OTHER, VALUE_WIDTH>(to + OTHER * WIDTH, from.value, first);
    bring_facts(facts, p, work.batch, head, first);
    end_group();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN) attention_wgmma_backward(Params p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    STORAGE* own_side = (STORAGE*)memory;
    STORAGE* own_value = own_side + OWN * WIDTH;
    STORAGE* stages = own_value + OWN * VALUE_WIDTH;
    float* all_facts = (float*)(stages + 2 * STAGE);

    Work work(p, blockIdx.x);
    if (work.items) {
        Sides own = work.own(p);
        fetch_swizzled<OWN, WIDTH>(own_side, own.side, work.row);
        fetch_swizzled<OWN, VALUE_WIDTH>(own_value, own.value, work.row);
        bring(stages, all_facts, p, work, work.head, work.begin);
    }
    int row = work.row + threadIdx.x / 32 * 16;
    Facts own;
    own_facts(own, p, work, row);

    Sums side_sums[TILES][WIDTH / 8], value_sums[TILES][VALUE_WIDTH / 8];
    clear(side_sums);
    clear(value_sums);
    int head = work.head, first = work.begin;
#pragma unroll 1
    for (int item = 0; item < work.items; ++item) {
        all_arrived();
        STORAGE *here = stages + item % 2 * STAGE, *here_value = here + OTHER * WIDTH;
        const float* facts = all_facts + item % 2 * 2 * OTHER;
        Sums s[TILES][OTHER / 8], dp[TILES][OTHER / 8];
        start_products<OWN, OTHER, WIDTH>(s, own_side, here);
        start_products<OWN, OTHER, VALUE_WIDTH>(dp, own_value, here_value);
        int next = first + OTHER, next_head = head, other = (item + 1) % 2;
        if (next >= work.end) next_head++, next = work.begin;
        if (item + 1 < work.items) bring(stages + other * STAGE, all_facts + other * 2 * OTHER, p, work, next_head, next);

        settle<1>();
        touch(s);
        weigh(s, own, facts, p, row, first);
        Left x[TILES][OTHER / 16], y[TILES][OTHER / 16];
        if (WITH_DV) {
            round<OTHER>(x, s);
            start_weighted<VALUE_WIDTH, OTHER>(value_sums, x, here_value);
            settle<1>();
        } else {
            settle<0>();
        }
        touch(dp);
        slope(s, dp, own, facts);
        round<OTHER>(y, s);
        start_weighted<WIDTH, OTHER>(side_sums, y, here);
        settle<0>();
        if (WITH_DV) touch(value_sums), touch(x);
        touch(side_sums);
        touch(y);
        head = next_head, first = next;
    }
    finish(p, work, row, side_sums, value_sums);
}
