// The parameters of the norms.

struct Params {
    const STORAGE* x;
    const REAL* w;
    const REAL* b;
    const STORAGE* dy;
    STORAGE* to;      // y, or dx
    REAL* mean;
    REAL* rstd;
    REAL* dw;         // a row of sums for each slot of threads
    REAL* db;
    i64 rows, columns;
    REAL eps, scale, inverse_scale, to_mean, count, inverse_count;   // count: columns, or 1 if there are none
};
