// The last states of sequences from those at the ends of all chunks, each from an initial state of zero: after common.cu.
// A thread has a state of a channel.

extern "C" __global__ void __launch_bounds__(THREADS) selective_scan_last(const __grid_constant__ Params p) {
    i64 id = (i64)blockIdx.x * THREADS + threadIdx.x, row = id / N, channels = p.batch * p.channels;
    if (row >= channels) return;
    int n = id % N;
    i64 flat = row * p.state + p.first_state + n;
    REAL a = p.a[row % p.channels * p.state + p.first_state + n] * REAL(LOG2_E);
    REAL h = p.initial_state ? p.initial_state[flat] : REAL(0);
    for (i64 chunk = 0; chunk < p.chunks; chunk++) {
        i64 of = chunk * channels + row;
        h = decayed(p.sums[of] * a, h, p.ends[of * N + n]);
    }
    p.last_state[flat] = h;
}
