// What the gradient of the selective scan sums, in an order that never changes.

// `groups` times `rows` rows of `width` sums over `parts` rows that lie groups-major in `from`, as
// (groups, parts, rows, width). The rows are some of batches of `length`: `span` in each from `first` on,
// and go to (batches, length, groups, state), from column `column` on.
struct Job {
    const REAL* from;
    void* to;
    i64 parts, groups, rows, width, span, length, first, state, column;
    i64 wide;
};

struct Params { Job jobs[5]; };

extern "C" __global__ void __launch_bounds__(256) sum_parts(const __grid_constant__ Params p) {
    const Job& job = p.jobs[blockIdx.y];
    i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
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
