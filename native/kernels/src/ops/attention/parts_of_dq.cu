// How the sums of dq lie in global memory: tile by tile of OTHER queries, of which two warpgroups have a part each. Thread
// by thread a part has the layout of mma.sync's sums, four of them at a time.

// Floats of a part: 64 queries by 64 columns.
constexpr int PART = 64 * 64;
// Whether the two parts differ in their queries, or in their columns.
constexpr int QUERY_PART = OTHER == 128, KEY_PART = WIDTH == 128;
