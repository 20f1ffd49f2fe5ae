// Errors as values: nothing is thrown across the FFI border, nothing exits.
#ifndef JAX_GN_STATUS_H_
#define JAX_GN_STATUS_H_

#include <string>
#include <utility>

namespace jax_gn {

enum class StatusCode { kOk, kInvalidArgument, kUnimplemented, kInternal, kResourceExhausted };

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// A failed Status whose message says where it was raised.
inline Status ErrorAt(const char* file, int line, StatusCode code, const std::string& text) {
  return Status(code, "jax_gn: " + text + " (" + file + ":" + std::to_string(line) + ")");
}

}  // namespace jax_gn

#define JAX_GN_ERROR(code, text) \
  ::jax_gn::ErrorAt(__FILE_NAME__, __LINE__, ::jax_gn::StatusCode::code, (text))

// Returns from the enclosing function when `expr`, a Status, is an error.
#define JAX_GN_TRY(expr)                                                           \
  do {                                                                             \
    if (::jax_gn::Status try_status = (expr); !try_status.ok()) return try_status; \
  } while (false)

#endif  // JAX_GN_STATUS_H_
