// Collectives between the processes of one mesh.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "collectives_reduce.h"
#include "pjrt.h"

namespace tt {

// Meets the other ranks; nothing to do where this process is alone. Waits until all have come.
PJRT_Error* JoinMesh();

enum class Op : uint8_t {
  kNone, kAllReduce, kAllGather, kReduceScatter, kAllToAll, kRaggedAllToAll, kPermute, kBroadcast
};

struct Failure {
  int code;  // PJRT_Error_Code
  std::string message;
};
using MaybeFailure = std::optional<Failure>;

// What one rank brings to a collective. Everything but the position of this rank must be the same on
// all members, which is checked each time.
struct Collective {
  Op op = Op::kNone;
  Reduction reduction = Reduction::kNone;
  int type = 0;                  // XLA_FFI_DataType of the elements
  std::vector<int64_t> shape;    // of this rank's input
  std::vector<int> ranks;        // the members, in the group's own order
  int position = 0;              // of this rank among them
  uint64_t detail = 0;           // of what else must agree, a hash
};

// In all of these, `in` and `out` are whole arrays in row-major order, which may not overlap
// except for AllReduce. Each blocks until this rank's result is there, or fails on every member.

// out = the reduction of every member's `in`, the same bits on all of them.
MaybeFailure AllReduce(const Collective& call, const void* in, void* out, size_t bytes);
// in [rows, row] of each member to out [rows, members, row], in bytes.
MaybeFailure AllGather(const Collective& call, const void* in, void* out, size_t rows, size_t row);
// in [rows, members, row], reduced, to this member's part out [rows, row].
MaybeFailure ReduceScatter(const Collective& call, const void* in, void* out, size_t rows, size_t row);
// in [members, block]: part j goes to member j; out [members, block]: part i came from member i.
MaybeFailure AllToAll(const Collective& call, const void* in, void* out, size_t block);
// Member `from`'s input; zeros where it is -1. Each pair's members must name each other.
MaybeFailure Permute(const Collective& call, const void* in, void* out, size_t bytes, int from, bool sends);
// The first member's input.
MaybeFailure Broadcast(const Collective& call, const void* in, void* out, size_t bytes);

// Where the parts of a ragged all-to-all begin and how long they are, one of each for a member; in rows.
struct Parts {
  const int64_t* input_offsets;
  const int64_t* send_sizes;
  const int64_t* output_offsets;  // in the receiver's output
};
// Row ranges of `in` to row ranges of the members' `out`, whose other rows stay as they are.
MaybeFailure RaggedAllToAll(const Collective& call, const void* in, size_t in_rows, void* out, size_t out_rows,
                            size_t row, const Parts& parts);

}  // namespace tt
