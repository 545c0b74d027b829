// The gated norm and its gradient, over the text that norms share. What are rows there are parts of rows here. Blocks go
// through them in steps that are a multiple of the groups, so a slot of threads always has the same part of a row, whose
// weights it holds and whose sums for dw it makes. The host gives NORM_FIRST: whether the norm comes before the gate.

struct Params {
    const STORAGE* x;
    const STORAGE* z;
    const REAL* w;
    const STORAGE* dy;
    STORAGE* to;      // y, or dx
    STORAGE* dz;
    REAL* dw;         // a row of sums for each slot of threads
    i64 rows, columns, groups;
    REAL eps, scale, inverse_scale, to_mean, inverse_count;
};
