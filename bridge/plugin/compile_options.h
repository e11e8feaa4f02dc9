// CompileOptionsProto, as far as the plugin must change it.
#pragma once

#include <string>
#include <string_view>

namespace tt {

// The options without those that the inner plugin would refuse: a TPU's own
// (xla_tpu_…) always, libtt's (enable_trace, …) on the emulated chip, where
// they mean nothing. Dropped ones are logged at debug level.
std::string FilterCompileOptions(std::string_view serialized);

}  // namespace tt
