// Adds up the partial sums of the selective scan's gradient, in a fixed order.

extern "C" __global__ void __launch_bounds__(THREADS) sum_parts(const __grid_constant__ Jobs p) {
    const Job& job = p.jobs[blockIdx.y];
    i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= job.groups * job.rows * job.width) return;
    i64 n = i % job.width, row = i / job.width % job.rows, group = i / job.width / job.rows;
    i64 stride = job.rows * job.width;
    const REAL* from = job.from + group * job.parts * stride + row * job.width + n;
    REAL sum = 0;
#pragma unroll 8
    for (i64 part = 0; part < job.parts; part++) sum += from[part * stride];
    i64 batch = row / job.span, step = row % job.span;
    i64 to = ((batch * job.length + job.first + step) * job.groups + group) * job.state + job.column + n;
    if (job.wide) ((REAL*)job.to)[to] = sum;
    else narrow(sum, ((STORAGE*)job.to)[to]);
}
