// One step of the causal convolution of each of many sequences, with SiLU behind it. A thread has a channel.

struct Params {
    const STORAGE* u;          // (batch, channels), rows apart by stride
    const REAL* w;             // (channels, WIDTH)
    const REAL* b;             // (channels), or none
    STORAGE* const* samples;   // the sequences' last samples, each (layers, WIDTH - 1, channels)
    STORAGE* y;                // (batch, channels)
    i64 layer, channels, stride;
};

extern "C" __global__ void __launch_bounds__(THREADS) step_conv(Params p) {
    let_others_begin();
    wait_for_others();
    i64 channel = (i64)blockIdx.x * THREADS + threadIdx.x, sequence = blockIdx.y;
    if (channel >= p.channels) return;
    STORAGE* samples = p.samples[sequence] + p.layer * (WIDTH - 1) * p.channels + channel;
    REAL b = p.b ? p.b[channel] : (REAL)0;
    STORAGE newest = p.u[sequence * p.stride + channel];
    narrow(convolve(samples, p.channels, p.w + channel * WIDTH, b, newest), p.y[sequence * p.channels + channel]);
}
