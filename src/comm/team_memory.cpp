// The part of TeamImpl that makes memory which peers can reach. Every step is agreed on before the next, so that an error on one
// rank is an error on all and nobody is left with half a window.
#include <algorithm>
#include <utility>

#include "comm/room.h"
#include "comm/team_impl.h"
#include "core/check.h"

namespace zero {
namespace {

// A message of another rank: its first byte says whether it is an error.
std::string good(const std::string& text) { return '+' + text; }
std::string bad(const std::string& text) { return '-' + text; }

template <typename Step>
std::string attempt(const Step& step) {
  try {
    return good(step());
  } catch (const c10::Error& error) {
    return bad(error.msg());
  } catch (const std::exception& error) {
    return bad(error.what());
  }
}

}  // namespace

std::string TeamImpl::room_verdict(std::int64_t bytes) const {
  return attempt([&] {
    // Threads: what this process holds is what all hold. Processes: each is taken to hold as much as this one.
    const std::int64_t ranks = team_.size();
    const std::int64_t held = bytes_held() * (team_.processes() ? ranks : 1);
    const Room room = available_room(held);
    ZERO_CHECK(bytes <= room.bytes / ranks, ranks, ranks == 1 ? " rank asks for " : " ranks on this node ask for ",
               readable_bytes(bytes), ranks == 1 ? "" : " each", ", but there is room for ", readable_bytes(room.bytes),
               " in all, limited by ", room.limited_by);
    return std::string();
  });
}

std::shared_ptr<Buffer::Impl> TeamImpl::make_window(std::int64_t bytes, const std::string& what, Backing backing,
                                                    const std::vector<std::string>& verdicts, const Swap& swap) {
  const auto agree = [&](const std::vector<std::string>& all) {
    for (const auto& verdict : all) {
      if (verdict[0] == '+') continue;
      throw AgreedError(detail::text(team_.here(), ": no shared memory for '", what, "': ", verdict.substr(1)));
    }
  };
  agree(verdicts);
  auto window = std::make_shared<Buffer::Impl>();
  window->self = team_.rank();
  window->bytes = bytes;
  window->parts.resize(static_cast<std::size_t>(team_.size()));
  auto& own = window->parts[static_cast<std::size_t>(team_.rank())];
  const bool processes = team_.processes();
  const auto tokens = swap(attempt([&] {
    own = Mapping::create(bytes, processes || backing == Backing::file);
    return token_of(own, processes);
  }));
  agree(tokens);
  const auto opened = swap(attempt([&] {
    for (int member = 0; member < team_.size(); ++member) {
      if (member == team_.rank()) continue;
      // Several nodes: tokens come in the order of the communicator's ranks.
      const auto index = tokens.size() == window->parts.size() ? member : team_.rank_in_world(member);
      window->parts[static_cast<std::size_t>(member)] =
          from_token(tokens[static_cast<std::size_t>(index)].substr(1), bytes, processes);
    }
    return std::string();
  }));
  agree(opened);
  if (backing == Backing::memory)
    for (const auto& part : window->parts) part->close_fd();
  return window;
}

const Buffer::Impl& TeamImpl::staging() {
  if (staging_ == nullptr) {
    const auto here = [&](const std::string& mine) { return team_.exchange(nullptr, mine); };
    try {
      staging_ = make_window(staging_bytes_, "staging copies", Backing::memory, here(room_verdict(staging_bytes_)), here);
    } catch (const AgreedError& error) {
      if (nodes() == 1) throw;
      ZERO_FAIL(error.msg());  // the other nodes don't know
    }
  }
  return *staging_;
}

}  // namespace zero
