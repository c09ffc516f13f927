// Bytes at offsets on a server that speaks RESP (Redis, Valkey, KeyDB, Dragonfly ...): a mover's own way there, without Python.
//
// Note [Chunks]: offset o lies in the key `prefix:k`, k = o / chunk. A piece that is a whole chunk is SET, which the server
// keeps without a copy; a part of one goes with SETRANGE, before which the key is made with an expiry if it is not there
// yet, so that no key is ever without one. Reads are GET and GETRANGE. All requests of a call are sent at once, straight
// from the caller's memory, and their replies are received at once, straight into it.
//
// Note [Frames]: who asks for bytes knows how many come, and so every byte of framing between them: it is received into a
// buffer of its own and compared. Where it differs, it is an error, a key that is gone, or not RESP; the connection is of no
// use from there on and is closed.
//
// Note [Ahead]: a server copies a reply before it sends it. If more is asked for than its caches hold, that takes it longer than
// a round trip does, so requests for bytes go out while others' replies come in, and not all at once.
//
// Note [Again]: a connection that was idle may have been closed meanwhile. Requests are the same however often they are made, so
// on a connection that turns out to be dead they are made again on a new one, a few times. That one must show a mark which was left when the
// store was opened: a server that came back without it has lost everything.
//
// Note [Forks]: a child of this process must not speak on its parent's connections. It makes its own; a pool belongs to a process.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

namespace {

// Not errnos; the same as in memory/native/tier.h and tiers/failures.py.
constexpr int kShortRead = 10001;
constexpr int kRefused = 10007;    // the server answers with an error
constexpr int kNotResp = 10008;    // the server answers with something else
constexpr int kForgotten = 10009;  // the server has not the mark that was left there

constexpr int64_t kBatch = 8 << 20;  // bytes of a request that is sent at once
constexpr int64_t kAhead = 512 << 10;  // see Note [Ahead]
constexpr int kFreshTries = 3;         // see Note [Again]
constexpr size_t kLongestLine = 500;

struct Part {
  int64_t chunk, from, bytes;
  char* data;
};

void append(std::string& out, std::initializer_list<std::string> words) {
  out += "*" + std::to_string(words.size()) + "\r\n";
  for (const std::string& word : words) out += "$" + std::to_string(word.size()) + "\r\n" + word + "\r\n";
}

int failed() {
  return errno == EAGAIN || errno == EWOULDBLOCK ? ETIMEDOUT : errno;
}

bool is_broken(int error) {
  return error == ECONNRESET || error == EPIPE || error == ENOTCONN || error == ECONNABORTED;
}

// The connections of one process that nobody uses now.
struct Pool {
  pid_t pid = getpid();
  std::mutex mutex;
  std::vector<int> idle;
  bool lost = false;  // the last thing that was heard of the server is that it is gone
  std::string error;  // the server's words, or what was wrong with them
};

class Store {
 public:
  sockaddr_storage address{};
  socklen_t address_bytes = 0;
  std::string handshake, welcome, prefix, expiry;
  int64_t chunk = 0;
  int timeout_ms = 0;
  size_t most_idle = 0;
  std::atomic<int64_t> written{0}, read{0}, requests{0}, round_trips{0}, connections{0}, high{0};

  Store() : pool_(new Pool) {}

  int move(bool write, char* data, int64_t bytes, int64_t offset) {
    while (bytes > 0) {
      int64_t n = std::min(bytes, kBatch);
      int error = move_batch(write, parts(data, n, offset));
      if (error) return error;
      (write ? written : read) += n;
      data += n;
      offset += n;
      bytes -= n;
    }
    return 0;
  }

  // Whether nothing is known against the server: a process that ends closes its connections.
  bool alive() {
    Pool& mine = pool();
    std::lock_guard<std::mutex> guard(mine.mutex);
    if (mine.lost) return false;
    return std::all_of(mine.idle.begin(), mine.idle.end(), [](int fd) { return is_quiet(fd); });
  }

  void shut() {
    shut_ = true;
    Pool& mine = pool();
    std::lock_guard<std::mutex> guard(mine.mutex);
    for (int fd : mine.idle) close(fd);
    mine.idle.clear();
  }

  std::string error() {
    Pool& mine = pool();
    std::lock_guard<std::mutex> guard(mine.mutex);
    return mine.error;
  }

 private:
  std::atomic<Pool*> pool_;
  std::atomic<bool> shut_{false};

  // See Note [Forks]. The parent's is left as it is: one of its threads may have held the lock.
  Pool& pool() {
    Pool* found = pool_.load();
    if (found->pid == getpid()) return *found;
    Pool* mine = new Pool;
    if (pool_.compare_exchange_strong(found, mine)) return *mine;
    delete mine;
    return *found;
  }

  std::vector<Part> parts(char* data, int64_t bytes, int64_t offset) const {
    std::vector<Part> found;
    while (bytes > 0) {
      int64_t from = offset % chunk, n = std::min(bytes, chunk - from);
      found.push_back({offset / chunk, from, n, data});
      data += n;
      offset += n;
      bytes -= n;
    }
    return found;
  }

  std::string key(const Part& part) const {
    return prefix + ":" + std::to_string(part.chunk);
  }

  int move_batch(bool write, const std::vector<Part>& parts) {
    if (write) {  // before the first is there: who removes the keys has to know of them
      int64_t end = parts.back().chunk + 1, seen = high.load();
      while (seen < end && !high.compare_exchange_weak(seen, end)) {
      }
    }
    for (int fresh_left = kFreshTries;;) {
      bool fresh = false;
      int error = 0, fd = take(fresh, error);
      if (fd < 0) return error;
      std::string said;
      error = write ? put(fd, parts, said) : get(fd, parts, said);
      if (!error) {
        give(fd);
        return 0;
      }
      close(fd);
      if (is_broken(error) && (!fresh || --fresh_left > 0)) continue;  // see Note [Again]; the pool empties
      note(error, said);
      return error;
    }
  }

  // ---- connections ----

  int take(bool& fresh, int& error) {
    Pool& mine = pool();
    error = EBADF;
    if (shut_) return -1;
    for (;;) {
      int fd = -1;
      {
        std::lock_guard<std::mutex> guard(mine.mutex);
        if (!mine.idle.empty()) {
          fd = mine.idle.back();
          mine.idle.pop_back();
        }
      }
      if (fd < 0) break;
      if (is_quiet(fd)) return fd;
      close(fd);
    }
    fresh = true;
    std::string said;
    int fd = connected(error, said);
    if (fd < 0) {
      note(error, said);
      return -1;
    }
    ++connections;
    std::lock_guard<std::mutex> guard(mine.mutex);
    mine.lost = false;
    return fd;
  }

  void give(int fd) {
    Pool& mine = pool();
    std::lock_guard<std::mutex> guard(mine.mutex);
    mine.lost = false;
    if (mine.idle.size() < most_idle && !shut_)
      mine.idle.push_back(fd);
    else
      close(fd);
  }

  void note(int error, const std::string& said) {
    Pool& mine = pool();
    std::lock_guard<std::mutex> guard(mine.mutex);
    mine.error = said;
    // What the server refuses it refuses alive.
    if (error != kRefused && error != ENOSPC && error != kShortRead) mine.lost = true;
  }

  static bool is_quiet(int fd) {
    pollfd one{fd, POLLIN | POLLRDHUP, 0};
    return poll(&one, 1, 0) == 0;
  }

  int connected(int& error, std::string& said) const {
    int fd = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
      error = errno;
      return -1;
    }
    error = connect(fd, reinterpret_cast<const sockaddr*>(&address), address_bytes) ? errno : 0;
    if (error == EINPROGRESS) {
      pollfd one{fd, POLLOUT, 0};
      int ready;
      while ((ready = poll(&one, 1, timeout_ms)) < 0 && errno == EINTR) {
      }
      socklen_t length = sizeof(error);
      if (ready == 0)
        error = ETIMEDOUT;
      else if (ready < 0 || getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0)
        error = errno;
    }
    if (!error) {
      int on = 1;
      timeval most{timeout_ms / 1000, (timeout_ms % 1000) * 1000};
      fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
      setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
      setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &most, sizeof(most));
      setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &most, sizeof(most));
      error = introduce(fd, said);
    }
    if (!error) return fd;
    close(fd);
    return -1;
  }

  int introduce(int fd, std::string& said) const {
    std::string request = handshake;
    std::vector<iovec> out{{request.data(), request.size()}};
    if (int error = send_all(fd, out)) return error;
    std::string buffer;
    for (size_t at = 0; at < welcome.size();) {
      size_t end = welcome.find("\r\n", at) + 2;
      std::string line;
      if (int error = read_line(fd, buffer, line)) return error;
      if (line != welcome.substr(at, end - at - 2)) {
        if (line == "$-1") return kForgotten;
        return unexpected(line, said);
      }
      at = end;
    }
    return 0;
  }

  // ---- requests and replies ----

  int put(int fd, const std::vector<Part>& parts, std::string& said) {
    std::deque<std::string> words;
    std::vector<iovec> out;
    std::string replies;  // what is expected of each: '+' OK, '?' OK or nothing, ':' a number
    for (const Part& part : parts) {
      std::string head, length = "$" + std::to_string(part.bytes) + "\r\n";
      std::string name = key(part), tail = "\r\n";
      std::string named = "$" + std::to_string(name.size()) + "\r\n" + name + "\r\n";
      if (part.bytes == chunk) {
        head = "*5\r\n$3\r\nSET\r\n" + named + length;
        tail += "$2\r\nEX\r\n$" + std::to_string(expiry.size()) + "\r\n" + expiry + "\r\n";
        replies += '+';
      } else {
        append(head, {"SET", name, "", "EX", expiry, "NX"});
        std::string from = std::to_string(part.from);
        head += "*4\r\n$8\r\nSETRANGE\r\n" + named + "$" + std::to_string(from.size()) + "\r\n" + from + "\r\n" + length;
        replies += "?:";
      }
      std::string& before = words.emplace_back(std::move(head));
      out.push_back({before.data(), before.size()});
      out.push_back({part.data, static_cast<size_t>(part.bytes)});
      std::string& after = words.emplace_back(std::move(tail));
      out.push_back({after.data(), after.size()});
    }
    ++round_trips;
    requests += static_cast<int64_t>(replies.size());
    int sent = send_all(fd, out);
    if (sent && !is_broken(sent)) return sent;
    // A server that hangs up says why first.
    std::string buffer, line;
    for (char wanted : replies) {
      int error = read_line(fd, buffer, line);
      if (error) return sent ? sent : error;
      bool fine = wanted == ':' ? line.starts_with(":") : line == "+OK" || (wanted == '?' && line == "$-1");
      if (!fine) return unexpected(line, said);
    }
    return sent;
  }

  int get(int fd, const std::vector<Part>& parts, std::string& said) {
    std::vector<std::string> frames, got;  // see Note [Frames]
    for (const Part& part : parts)
      frames.push_back((frames.empty() ? "$" : "\r\n$") + std::to_string(part.bytes) + "\r\n");
    frames.push_back("\r\n");
    ++round_trips;
    requests += static_cast<int64_t>(parts.size());
    for (const std::string& frame : frames) got.emplace_back(frame.size(), '\0');
    std::vector<iovec> in;
    for (size_t i = 0; i < frames.size(); ++i) {
      in.push_back({got[i].data(), got[i].size()});
      if (i < parts.size()) in.push_back({parts[i].data, static_cast<size_t>(parts[i].bytes)});
    }
    size_t at = 0, within = 0;  // where the next byte belongs
    size_t asked = 0;           // parts that were asked for
    int64_t ahead = 0;          // bytes of them that are not here yet
    while (at < in.size()) {
      if (int error = ask(fd, parts, asked, ahead)) return error;
      iovec whole = in[at];
      in[at] = {static_cast<char*>(whole.iov_base) + within, whole.iov_len - within};
      msghdr message{};
      message.msg_iov = &in[at];
      message.msg_iovlen = std::min<size_t>(in.size() - at, 64);
      ssize_t n = recvmsg(fd, &message, 0);
      in[at] = whole;
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return failed();
      if (n == 0) return ECONNRESET;
      for (auto left = static_cast<size_t>(n); left > 0;) {
        size_t step = std::min(left, in[at].iov_len - within);
        within += step;
        left -= step;
        if (at % 2 == 0 && got[at / 2].compare(0, within, frames[at / 2], 0, within) != 0)
          return differs(fd, in, at, within, left, said);
        if (at % 2 == 1) ahead -= static_cast<int64_t>(step);
        if (within == in[at].iov_len) {
          ++at;
          within = 0;
        }
      }
    }
    return 0;
  }

  // Ask for the next parts, see Note [Ahead].
  int ask(int fd, const std::vector<Part>& parts, size_t& asked, int64_t& ahead) const {
    std::string request;
    for (; asked < parts.size() && ahead < kAhead; ++asked) {
      const Part& part = parts[asked];
      if (part.bytes == chunk)
        append(request, {"GET", key(part)});
      else
        append(request, {"GETRANGE", key(part), std::to_string(part.from), std::to_string(part.from + part.bytes - 1)});
      ahead += part.bytes;
    }
    std::vector<iovec> out{{request.data(), request.size()}};
    return request.empty() ? 0 : send_all(fd, out);
  }

  // Why a frame, of which `within` bytes have come, with `left` that follow them, is another one.
  int differs(int fd, const std::vector<iovec>& in, size_t at, size_t within, size_t left, std::string& said) const {
    std::string stream(static_cast<char*>(in[at].iov_base), within);
    for (size_t next = at, skip = within; left > 0 && stream.size() < kLongestLine; ++next, skip = 0) {
      size_t n = std::min(left, in[next].iov_len - skip);
      stream.append(static_cast<char*>(in[next].iov_base) + skip, std::min(n, kLongestLine));
      left -= n;
    }
    if (at > 0) {
      if (!stream.starts_with(std::string("\r\n").substr(0, stream.size()))) return unexpected(stream, said);
      stream.erase(0, 2);
    }
    std::string line;
    if (int error = read_line(fd, stream, line)) return error;
    if (line.starts_with("$")) return kShortRead;  // fewer bytes, or none
    return unexpected(line, said);
  }

  static int unexpected(const std::string& line, std::string& said) {
    if (line.starts_with("-")) {
      said = line.substr(1);
      return said.starts_with("OOM") ? ENOSPC : kRefused;
    }
    said = line.substr(0, 40);
    for (char& letter : said)
      if (letter < ' ' || letter > '~') letter = '.';
    return kNotResp;
  }

  static int send_all(int fd, std::vector<iovec>& out) {
    for (size_t at = 0; at < out.size();) {
      msghdr message{};
      message.msg_iov = &out[at];
      message.msg_iovlen = std::min<size_t>(out.size() - at, 64);
      ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return failed();
      for (auto left = static_cast<size_t>(n); at < out.size(); ++at) {
        size_t step = std::min(left, out[at].iov_len);
        left -= step;
        out[at] = {static_cast<char*>(out[at].iov_base) + step, out[at].iov_len - step};
        if (out[at].iov_len > 0) break;
      }
    }
    return 0;
  }

  // The next line, without its end; what was received beyond it stays in `buffer`.
  static int read_line(int fd, std::string& buffer, std::string& line) {
    for (;;) {
      size_t end = buffer.find("\r\n");
      if (end != std::string::npos || buffer.size() >= kLongestLine) {
        line = buffer.substr(0, end);
        buffer.erase(0, end == std::string::npos ? end : end + 2);
        return 0;
      }
      char more[4096];
      ssize_t n = recv(fd, more, sizeof(more), 0);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return failed();
      if (n == 0) return ECONNRESET;
      buffer.append(more, n);
    }
  }
};

}  // namespace

extern "C" {

// `handshake`: the bytes that a new connection begins with; `welcome`: those that the server then has to answer with.
void* lr_open(
    const char* host,
    int port,
    const char* handshake,
    int64_t handshake_bytes,
    const char* welcome,
    int64_t welcome_bytes,
    const char* prefix,
    int64_t chunk,
    int64_t expiry_s,
    int timeout_ms,
    int most_idle) {
  auto* store = new Store;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&store->address);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&store->address);
  if (inet_pton(AF_INET, host, &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(static_cast<uint16_t>(port));
    store->address_bytes = sizeof(*v4);
  } else if (inet_pton(AF_INET6, host, &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(static_cast<uint16_t>(port));
    store->address_bytes = sizeof(*v6);
  } else {
    delete store;
    return nullptr;
  }
  store->handshake.assign(handshake, handshake_bytes);
  store->welcome.assign(welcome, welcome_bytes);
  store->prefix = prefix;
  store->chunk = chunk;
  store->expiry = std::to_string(expiry_s);
  store->timeout_ms = timeout_ms;
  store->most_idle = static_cast<size_t>(most_idle);
  return store;
}

// Move bytes; blocks. Returns 0, an errno or one of the codes above.
int lr_move(void* store, int write, int64_t offset, void* data, int64_t bytes) {
  return static_cast<Store*>(store)->move(write != 0, static_cast<char*>(data), bytes, offset);
}

int lr_alive(void* store) {
  return static_cast<Store*>(store)->alive() ? 1 : 0;
}

// bytes written and read, requests, round trips, connections that were made, chunks up to the last that was written
void lr_counters(void* store, int64_t* out) {
  auto* from = static_cast<Store*>(store);
  int64_t values[] = {from->written, from->read, from->requests, from->round_trips, from->connections, from->high};
  std::memcpy(out, values, sizeof(values));
}

// What the server said when something failed last.
void lr_error(void* store, char* out, int64_t room) {
  std::string text = static_cast<Store*>(store)->error();
  auto n = std::min<size_t>(text.size(), room - 1);
  std::memcpy(out, text.data(), n);
  out[n] = 0;
}

// Close the connections that are idle, and make none from here on. The store stays: a mover may be about to ask.
void lr_close(void* store) {
  static_cast<Store*>(store)->shut();
}
}
