// The fault: a boxed fallback on kPagedKey, registered once per process when the library is loaded, through which every operator
// passes that touches a paged tensor, and no other. It finds the tensors' owners in the table, has them make resident what the
// operator reads or writes, runs the operator below the key, and tells the owners. An owner's exception reaches the caller.
#pragma once

namespace zero {

/// How many operators have come through the fallback in this process: for tests and benchmarks (nothing else may use it).
long faults_seen();

}  // namespace zero
