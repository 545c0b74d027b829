// One step of the causal convolution of each sequence, with fused SiLU. One thread per channel.

extern "C" __global__ void __launch_bounds__(THREADS) step_conv(Conv p) {
    let_others_begin();
    i64 channel = (i64)blockIdx.x * THREADS + threadIdx.x, sequence = blockIdx.y;
    if (channel >= p.channels) return;
    i64 state = p.layer * (WIDTH - 1) * p.channels + channel;
    // Loaded before the wait, as no earlier kernel of the step writes conv_state or weights.
    Taps held = taps(p.samples[sequence] + state, p.channels, p.w + channel * WIDTH, p.b ? p.b + channel : 0);
    wait_for_others();
    STORAGE newest = p.u[sequence * p.stride + channel];
    narrow(convolve(held, newest), p.y[sequence * p.channels + channel]);
    keep(held, p.next_samples[sequence] + state, p.channels, newest);
}
