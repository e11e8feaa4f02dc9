// The handlers behind the calls that bridge/compiler/collectives.py writes in the place of
// StableHLO's collectives. A program is the same on all ranks: who this one is, is asked when it runs.
#include "bridge/plugin/collectives.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "bridge/plugin/mesh.h"
#include "handlers.h"
#include "xla/ffi/api/ffi.h"

namespace tt {
namespace {

namespace ffi = xla::ffi;
using Numbers = ffi::Span<const int64_t>;

ffi::Error Outcome(const MaybeFailure& failure) {
  if (!failure) return ffi::Error::Success();
  return ffi::Error(static_cast<ffi::ErrorCode>(failure->code), failure->message);
}

ffi::Error Wrong(std::string what) { return ffi::Error::InvalidArgument("tt_tpu collective: " + std::move(what)); }

uint64_t Hash(uint64_t hash, uint64_t value) {
  for (int i = 0; i < 8; ++i) hash = (hash ^ (value >> 8 * i & 0xff)) * 1099511628211u;
  return hash;
}

Reduction ReductionNamed(std::string_view name) {
  for (int i = 1; i <= static_cast<int>(Reduction::kXor); ++i) {
    if (name == ReductionName(static_cast<Reduction>(i))) return static_cast<Reduction>(i);
  }
  return Reduction::kNone;
}

// The call of this rank: its group is the one of `groups` (one after the other, `group_size` ranks each) that it is in.
// `position` stays -1 where it is in none.
Collective Describe(Op op, const ffi::AnyBuffer& x, Numbers groups, int64_t group_size) {
  Collective call;
  call.op = op;
  call.type = static_cast<int>(x.element_type());
  call.shape.assign(x.dimensions().begin(), x.dimensions().end());
  call.position = -1;
  const auto* found = std::find(groups.begin(), groups.end(), GetWorld().rank);
  if (found == groups.end() || group_size < 1) return call;
  const int64_t index = found - groups.begin(), first = index / group_size * group_size;
  call.position = static_cast<int>(index - first);
  call.detail = 14695981039346656037u;
  for (int64_t i = 0; i < group_size; ++i) {
    call.ranks.push_back(static_cast<int>(groups[first + i]));
    call.detail = Hash(call.detail, groups[first + i]);
  }
  return call;
}

ffi::Error NotInAGroup() {
  return Wrong("rank " + std::to_string(GetWorld().rank) + " is in none of the program's replica groups");
}

// Where the chain of a program's collectives goes through: its value says nothing.
void Pass(const ffi::AnyBuffer& before, ffi::Result<ffi::AnyBuffer>& after) {
  memcpy(after->untyped_data(), before.untyped_data(), std::min(before.size_bytes(), after->size_bytes()));
}

ffi::Error RunAllReduce(ffi::AnyBuffer x, ffi::AnyBuffer chain, ffi::Result<ffi::AnyBuffer> y,
                        ffi::Result<ffi::AnyBuffer> chained, Numbers groups, int64_t group_size,
                        std::string_view reduction) {
  Collective call = Describe(Op::kAllReduce, x, groups, group_size);
  if (call.position < 0) return NotInAGroup();
  if (y->size_bytes() != x.size_bytes()) return Wrong("all_reduce: the result has another size than the operand");
  call.reduction = ReductionNamed(reduction);
  Pass(chain, chained);
  return Outcome(AllReduce(call, x.untyped_data(), y->untyped_data(), x.size_bytes()));
}

ffi::Error RunAllGather(ffi::AnyBuffer x, ffi::AnyBuffer chain, ffi::Result<ffi::AnyBuffer> y,
                        ffi::Result<ffi::AnyBuffer> chained, Numbers groups, int64_t group_size, int64_t rows) {
  Collective call = Describe(Op::kAllGather, x, groups, group_size);
  if (call.position < 0) return NotInAGroup();
  if (rows < 1 || x.size_bytes() % rows != 0 || y->size_bytes() != x.size_bytes() * group_size) {
    return Wrong("all_gather: the sizes do not fit");
  }
  call.detail = Hash(call.detail, rows);
  Pass(chain, chained);
  return Outcome(AllGather(call, x.untyped_data(), y->untyped_data(), rows, x.size_bytes() / rows));
}

ffi::Error RunReduceScatter(ffi::AnyBuffer x, ffi::AnyBuffer chain, ffi::Result<ffi::AnyBuffer> y,
                            ffi::Result<ffi::AnyBuffer> chained, Numbers groups, int64_t group_size, int64_t rows,
                            std::string_view reduction) {
  Collective call = Describe(Op::kReduceScatter, x, groups, group_size);
  if (call.position < 0) return NotInAGroup();
  if (rows < 1 || y->size_bytes() % rows != 0 || x.size_bytes() != y->size_bytes() * group_size) {
    return Wrong("reduce_scatter: the sizes do not fit");
  }
  call.reduction = ReductionNamed(reduction);
  call.detail = Hash(call.detail, rows);
  Pass(chain, chained);
  return Outcome(ReduceScatter(call, x.untyped_data(), y->untyped_data(), rows, y->size_bytes() / rows));
}

ffi::Error RunAllToAll(ffi::AnyBuffer x, ffi::AnyBuffer chain, ffi::Result<ffi::AnyBuffer> y,
                       ffi::Result<ffi::AnyBuffer> chained, Numbers groups, int64_t group_size) {
  Collective call = Describe(Op::kAllToAll, x, groups, group_size);
  if (call.position < 0) return NotInAGroup();
  if (x.size_bytes() % group_size != 0 || y->size_bytes() != x.size_bytes()) return Wrong("all_to_all: the sizes do not fit");
  Pass(chain, chained);
  return Outcome(AllToAll(call, x.untyped_data(), y->untyped_data(), x.size_bytes() / group_size));
}

// Offsets and sizes as StableHLO has them: in rows, of int32 or int64.
bool ReadParts(const ffi::AnyBuffer& numbers, int64_t count, std::vector<int64_t>* parts) {
  if (static_cast<int64_t>(numbers.element_count()) != count) return false;
  auto read = [&](const auto* from) { parts->assign(from, from + count); };
  switch (numbers.element_type()) {
    case ffi::S32: read(static_cast<const int32_t*>(numbers.untyped_data())); return true;
    case ffi::S64: read(static_cast<const int64_t*>(numbers.untyped_data())); return true;
    default: return false;
  }
}

ffi::Error RunRaggedAllToAll(ffi::AnyBuffer x, ffi::AnyBuffer before, ffi::AnyBuffer input_offsets,
                             ffi::AnyBuffer send_sizes, ffi::AnyBuffer output_offsets, ffi::AnyBuffer chain,
                             ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> chained, Numbers groups,
                             int64_t group_size) {
  Collective call = Describe(Op::kRaggedAllToAll, x, groups, group_size);
  if (call.position < 0) return NotInAGroup();
  std::vector<int64_t> from, sizes, to;
  if (!ReadParts(input_offsets, group_size, &from) || !ReadParts(send_sizes, group_size, &sizes) ||
      !ReadParts(output_offsets, group_size, &to)) {
    return Wrong("ragged_all_to_all: offsets and sizes must be integers, one for each rank of the group");
  }
  if (x.dimensions().size() == 0 || y->dimensions().size() == 0 || before.size_bytes() != y->size_bytes()) {
    return Wrong("ragged_all_to_all: the shapes do not fit");
  }
  const int64_t in_rows = x.dimensions()[0], out_rows = y->dimensions()[0];
  const size_t row = in_rows > 0 ? x.size_bytes() / in_rows : 0;
  if (in_rows > 0 && out_rows > 0 && y->size_bytes() / out_rows != row) return Wrong("ragged_all_to_all: rows of two sizes");
  memcpy(y->untyped_data(), before.untyped_data(), y->size_bytes());
  Pass(chain, chained);
  const Parts parts{from.data(), sizes.data(), to.data()};
  return Outcome(RaggedAllToAll(call, x.untyped_data(), in_rows, y->untyped_data(), out_rows, row, parts));
}

// `pairs`: source, target, source, target and so on; `members`: every rank that is in one.
ffi::Error RunPermute(ffi::AnyBuffer x, ffi::AnyBuffer chain, ffi::Result<ffi::AnyBuffer> y,
                      ffi::Result<ffi::AnyBuffer> chained, Numbers members, Numbers pairs) {
  Collective call = Describe(Op::kPermute, x, members, static_cast<int64_t>(members.size()));
  if (y->size_bytes() != x.size_bytes()) return Wrong("collective_permute: the result has another size than the operand");
  Pass(chain, chained);
  if (call.position < 0) {  // nobody sends to this rank, nor waits for it
    memset(y->untyped_data(), 0, y->size_bytes());
    return ffi::Error::Success();
  }
  int from = -1;
  bool sends = false;
  for (size_t i = 0; i + 1 < pairs.size(); i += 2) {
    call.detail = Hash(Hash(call.detail, pairs[i]), pairs[i + 1]);
    sends = sends || pairs[i] == GetWorld().rank;
    if (pairs[i + 1] == GetWorld().rank) {
      from = static_cast<int>(std::find(members.begin(), members.end(), pairs[i]) - members.begin());
    }
  }
  return Outcome(Permute(call, x.untyped_data(), y->untyped_data(), x.size_bytes(), from, sends));
}

ffi::Error RunBroadcast(ffi::AnyBuffer x, ffi::AnyBuffer chain, ffi::Result<ffi::AnyBuffer> y,
                        ffi::Result<ffi::AnyBuffer> chained, Numbers groups, int64_t group_size) {
  Collective call = Describe(Op::kBroadcast, x, groups, group_size);
  if (y->size_bytes() != x.size_bytes()) return Wrong("broadcast: the result has another size than the operand");
  Pass(chain, chained);
  if (call.position < 0) {  // StableHLO: a rank in no group gets zeros
    memset(y->untyped_data(), 0, y->size_bytes());
    return ffi::Error::Success();
  }
  return Outcome(Broadcast(call, x.untyped_data(), y->untyped_data(), x.size_bytes()));
}

// This rank's place in `order`, the ranks by their number in the program.
ffi::Error RunPlace(ffi::Result<ffi::AnyBuffer> y, Numbers order) {
  const auto* found = std::find(order.begin(), order.end(), GetWorld().rank);
  if (found == order.end()) return Wrong("rank " + std::to_string(GetWorld().rank) + " is not among the program's devices");
  if (y->element_type() != ffi::U32 || y->element_count() != 1) return Wrong("an id is one uint32");
  *static_cast<uint32_t*>(y->untyped_data()) = static_cast<uint32_t>(found - order.begin());
  return ffi::Error::Success();
}

#define BIND(inputs) ffi::Ffi::Bind() inputs.Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
#define TWO .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
#define GROUPS .Attr<Numbers>("groups").Attr<int64_t>("group_size")

XLA_FFI_DEFINE_HANDLER(kAllReduce, RunAllReduce, BIND(TWO) GROUPS.Attr<std::string_view>("reduction"));
XLA_FFI_DEFINE_HANDLER(kAllGather, RunAllGather, BIND(TWO) GROUPS.Attr<int64_t>("rows"));
XLA_FFI_DEFINE_HANDLER(kReduceScatter, RunReduceScatter,
                       BIND(TWO) GROUPS.Attr<int64_t>("rows").Attr<std::string_view>("reduction"));
XLA_FFI_DEFINE_HANDLER(kAllToAll, RunAllToAll, BIND(TWO) GROUPS);
XLA_FFI_DEFINE_HANDLER(kRaggedAllToAll, RunRaggedAllToAll, BIND(TWO TWO TWO) GROUPS);
XLA_FFI_DEFINE_HANDLER(kPermute, RunPermute, BIND(TWO).Attr<Numbers>("members").Attr<Numbers>("pairs"));
XLA_FFI_DEFINE_HANDLER(kBroadcast, RunBroadcast, BIND(TWO) GROUPS);
XLA_FFI_DEFINE_HANDLER(kPlace, RunPlace, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>().Attr<Numbers>("order"));

#undef BIND
#undef TWO
#undef GROUPS

template <class Handler>
FfiHandler Named(const char* target, Handler handler) {
  return {target, reinterpret_cast<void*>(handler)};
}

}  // namespace

std::vector<FfiHandler> CollectiveHandlers() {
  return {
      Named("tt_tpu.all_reduce", kAllReduce),
      Named("tt_tpu.all_gather", kAllGather),
      Named("tt_tpu.reduce_scatter", kReduceScatter),
      Named("tt_tpu.all_to_all", kAllToAll),
      Named("tt_tpu.ragged_all_to_all", kRaggedAllToAll),
      Named("tt_tpu.collective_permute", kPermute),
      Named("tt_tpu.collective_broadcast", kBroadcast),
      Named("tt_tpu.rank", kPlace),
  };
}

}  // namespace tt
