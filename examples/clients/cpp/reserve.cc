// Reserves a GPU, renews the lease, and gives the GPU back.
//
//   make && ./reserve localhost:7070
//
// A token is read from the file that GPUSCALE_TOKEN_FILE names, the authority's certificate from GPUSCALE_CA_FILE.
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>

#include <grpcpp/grpcpp.h>

#include "gpuscale/api/allocator/v1/allocator_service.grpc.pb.h"

namespace api = gpuscale::api::allocator::v1;

std::string contents(const char* variable) {
  const char* path = std::getenv(variable);
  if (path == nullptr) return "";
  std::ifstream file(path);
  std::string text(std::istreambuf_iterator<char>(file), {});
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.pop_back();
  return text;
}

// Calls a method with a deadline of ten seconds, and says what came of it.
template <typename Request, typename Response>
grpc::Status call(api::AllocatorService::Stub& stub,
                  grpc::Status (api::AllocatorService::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                  const Request& request, Response* response) {
  static const std::string token = contents("GPUSCALE_TOKEN_FILE");
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
  return (stub.*method)(&context, request, response);
}

void expect(const grpc::Status& status) {
  if (status.ok()) return;
  std::cerr << "error " << status.error_code() << ": " << status.error_message() << "\n";
  std::exit(1);
}

int main(int count, char** words) {
  grpc::SslCredentialsOptions tls{contents("GPUSCALE_CA_FILE"), "", ""};
  auto credentials = tls.pem_root_certs.empty() ? grpc::InsecureChannelCredentials() : grpc::SslCredentials(tls);
  api::AllocatorService::Stub stub(grpc::CreateChannel(count > 1 ? words[1] : "localhost:7070", credentials));
  using Stub = api::AllocatorService::Stub;

  std::string id;  // a new UUID for each grant that is wanted
  std::getline(std::ifstream("/proc/sys/kernel/random/uuid"), id);
  api::ReserveRequest wish;
  wish.set_request_id(id);
  wish.set_holder("cpp");
  wish.mutable_ask()->set_gpu_count(1);
  api::ReserveResponse granted;
  expect(call(stub, &Stub::Reserve, wish, &granted));
  const auto& held = granted.reservation();
  std::cout << "reserved " << held.name() << " " << held.gpus(0).uuid() << "\n";
  api::ReserveResponse again;  // as after an answer that was lost: the same request_id, the same grant
  expect(call(stub, &Stub::Reserve, wish, &again));
  std::cout << "repeated " << again.reservation().name() << "\n";

  api::RenewReservationRequest renewal;
  renewal.set_name(held.name());
  renewal.set_fence(held.fence());
  api::RenewReservationResponse renewed;
  expect(call(stub, &Stub::RenewReservation, renewal, &renewed));
  std::cout << "renewed " << renewed.reservation().remaining().seconds() << "\n";

  api::ReleaseReservationRequest release;
  release.set_name(held.name());
  release.set_fence(held.fence());
  api::ReleaseReservationResponse released;
  expect(call(stub, &Stub::ReleaseReservation, release, &released));
  std::cout << "released " << held.name() << "\n";
  // Its details are a google.rpc.Status with ErrorInfo: status.error_details(), for who has googleapis' protos.
  const grpc::Status refused = call(stub, &Stub::RenewReservation, renewal, &renewed);
  std::cout << "refused " << refused.error_code() << " " << (refused.error_details().empty() ? "" : "with details") << "\n";
}
