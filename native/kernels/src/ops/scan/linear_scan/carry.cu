// Replaces the last states of chunks by the states into them. A warp has a channel of a batch, and a lane some successive
// chunks; over a chunk the state is multiplied by the product of its a. In BACKWARD from the last chunk to the first.
//   STATES_FIRST   whether to write the last state too

// `state` carried over what multiplies it by `product` and adds `end`. An infinite product must not turn zero into NaN.
__device__ __forceinline__ REAL carried(REAL product, REAL state, REAL end) {
    return state == REAL(0) ? end : product * state + end;
}

extern "C" __global__ void linear_scan_carry(Params p) {
    i64 rows = p.batch * p.channels, row = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    int lane = threadIdx.x % 32;
    i64 each = (p.chunks + 31) / 32, first = lane * each;
    i64 last = first + each < p.chunks ? first + each : p.chunks;
    auto place = [&](i64 turn) { return (BACKWARD ? p.chunks - 1 - turn : turn) * rows + row; };
    REAL product = 1, state = 0;
#pragma unroll 8
    for (i64 turn = first; turn < last; turn++) {
        REAL own = p.products[place(turn)];
        state = carried(own, state, p.ends[place(turn)]);
        product *= own;
    }
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        REAL before = __shfl_up_sync(0xffffffff, product, apart), carry = __shfl_up_sync(0xffffffff, state, apart);
        if (lane >= apart) state = carried(product, carry, state), product *= before;
    }
    product = __shfl_up_sync(0xffffffff, product, 1), state = __shfl_up_sync(0xffffffff, state, 1);
    const REAL* initial = BACKWARD ? p.dlast_state : p.initial_state;
    REAL start = initial ? initial[row] : REAL(0);
    state = lane == 0 ? start : carried(product, start, state);
#pragma unroll 8
    for (i64 turn = first; turn < last; turn++) {
        i64 at = place(turn);
        REAL before = state;
        state = carried(p.products[at], state, p.ends[at]);
        p.ends[at] = before;
    }
    REAL* to = BACKWARD ? p.dinitial_state : p.last_state;
    if (STATES_FIRST && to && first < p.chunks && last == p.chunks) to[row] = state;
}
