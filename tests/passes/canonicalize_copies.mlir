// RUN: secc opt %s -p 'canonicalize' | filecheck %s

// A block may write into what it is given: a copy that it gets, or that keeps what it got, stays. So does + 0.

sec.graph "g" {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.block "a" class "A" params 10 trainable 10
  sec.block "relu" class "ReLU" params 1 trainable 1
  sec.case "all" when [] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    // CHECK: %h = sec.call "a" (%x)
    %h = sec.call "a" (%x) args "$0" outs [""] : !sec.tensor<[B, 8], f32, grad>
    // CHECK-NEXT: %copy = sec.glue "aten._to_copy.default" (%h)
    %copy = sec.glue "aten._to_copy.default" (%h) args "$0, dtype=torch.float32" : !sec.tensor<[B, 8], f32, grad>
    // CHECK-NEXT: %r = sec.call "relu" (%copy)
    %r = sec.call "relu" (%copy) args "$0" outs [""] : !sec.tensor<[B, 8], f32, grad>
    // CHECK-NEXT: %zero = sec.glue "aten.add.Tensor" (%h) args "$0, 0"
    %zero = sec.glue "aten.add.Tensor" (%h) args "$0, 0" : !sec.tensor<[B, 8], f32, grad>
    // CHECK-NEXT: %q = sec.call "relu" (%zero)
    %q = sec.call "relu" (%zero) args "$0" outs [""] : !sec.tensor<[B, 8], f32, grad>
    // CHECK-NEXT: sec.glue "aten.add.Tensor" (%r, %q)
    %one = sec.glue "aten.mul.Tensor" (%r) args "$0, 1" : !sec.tensor<[B, 8], f32, grad>
    %s = sec.glue "aten.add.Tensor" (%one, %q) args "$0, $1" : !sec.tensor<[B, 8], f32, grad>
    %t = sec.glue "aten.add.Tensor" (%s, %h) args "$0, $1" : !sec.tensor<[B, 8], f32, grad>
    %loss = sec.glue "aten.sum.default" (%t) args "$0" : !sec.tensor<[], f32, grad>
    sec.return (%loss)
  }
}
