// Routers: which experts of a mixture a row uses, and how much each counts. What a host passes to
// the two kernels, the products of rows and experts and the choice.

struct RouteParams {
  const float* x;       // [rows, hidden]
  const float* weight;  // [experts, hidden]
  const float* bias;    // [experts], or null
  float* scores;        // [rows, experts]: logits, then scores
  int* ids;             // [rows, used]
  float* gates;         // [rows, used]
  i64 rows;
  i64 hidden;
  u32 experts;
  u32 used;
  u32 groups;
  u32 used_groups;
  u32 normalize;
  float scale;
};

static_assert(sizeof(RouteParams) == 88, "the host mirrors this");
