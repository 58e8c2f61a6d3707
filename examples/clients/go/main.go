// Reserves a GPU, renews the lease, and gives the GPU back.
//
//	buf generate ../../../protos/gpuscale/api/contract.binpb --path gpuscale/api --template ../../../protos/buf.gen.yaml && go run . localhost:7070
//
// A token is read from the file that GPUSCALE_TOKEN_FILE names, the authority's certificate from GPUSCALE_CA_FILE.
package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"log"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	api "example.com/gpuscale/gen/gpuscale/api/allocator/v1"
)

func main() {
	address := "localhost:7070"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	security := grpc.WithInsecure()
	if file := os.Getenv("GPUSCALE_CA_FILE"); file != "" {
		security = grpc.WithTransportCredentials(must(credentials.NewClientTLSFromFile(file, "")))
	}
	channel := must(grpc.Dial(address, security))
	defer channel.Close()
	client := api.NewAllocatorServiceClient(channel)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if file := os.Getenv("GPUSCALE_TOKEN_FILE"); file != "" {
		token := strings.TrimSpace(string(must(os.ReadFile(file))))
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}

	wish := &api.ReserveRequest{RequestId: uuid(), Holder: "go", Ask: &api.Ask{GpuCount: 1}}
	held := must(client.Reserve(ctx, wish)).Reservation
	fmt.Println("reserved", held.Name, held.Gpus[0].Uuid)
	// As after an answer that was lost: the same request_id, the same grant.
	fmt.Println("repeated", must(client.Reserve(ctx, wish)).Reservation.Name)
	renewal := &api.RenewReservationRequest{Name: held.Name, Fence: held.Fence}
	renewed := must(client.RenewReservation(ctx, renewal)).Reservation
	fmt.Println("renewed", renewed.Remaining.Seconds)
	release := &api.ReleaseReservationRequest{Name: held.Name, Fence: held.Fence}
	must(client.ReleaseReservation(ctx, release))
	fmt.Println("released", held.Name)
	_, err := client.RenewReservation(ctx, renewal)
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			fmt.Println("refused", int(status.Code(err)), info.Reason)
		}
	}
}

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}

// uuid makes a random one: version 4 of RFC 9562.
func uuid() string {
	b := make([]byte, 16)
	must(rand.Read(b))
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
