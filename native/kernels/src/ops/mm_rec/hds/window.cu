// The rows of a level of `from` that row j of a level of `to` is the average of; with both numbers the other way
// round, the rows above whose windows have row j.
struct Window {
    i64 begin, end;
    __device__ Window(i64 j, i64 from, i64 to) : begin(j * from / to), end(((j + 1) * from + to - 1) / to) {}
    __device__ i64 count() const { return end - begin; }
};
