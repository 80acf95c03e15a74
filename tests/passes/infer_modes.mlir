// RUN: secc opt %s -p infer-modes | filecheck %s

// `train` with trainable parameters under grad mode, `dgrad` where a gradient only passes through, `forward` without one: in no_grad, in
// front of the first trainable block, or behind a detach.

sec.graph "g" {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.block "frozen" class "F" params 10 trainable 0
  sec.block "adapter" class "A" params 10 trainable 10
  sec.block "stem" class "A" params 10 trainable 10
  sec.case "all" when [] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    // CHECK: %f = sec.call "frozen" {{.*}} {mode = "forward"}
    %f = sec.call "frozen" (%x) args "$0" outs [""] : !sec.tensor<[B, 8], f32>
    // CHECK-NEXT: %a = sec.call "adapter" {{.*}} {mode = "train"}
    %a = sec.call "adapter" (%f) args "$0" outs [""] : !sec.tensor<[B, 8], f32, grad>
    // CHECK-NEXT: %l = sec.call "frozen" {{.*}} {mode = "dgrad"}
    %l = sec.call "frozen" (%a) args "$0" outs [""] : !sec.tensor<[B, 8], f32, grad>
    // CHECK-NEXT: %t = sec.call "adapter" {{.*}} no_grad {mode = "forward"}
    %t = sec.call "adapter" (%x) args "$0" outs [""] no_grad : !sec.tensor<[B, 8], f32>
    // CHECK-NEXT: %stopped = sec.call "stem" {{.*}} {mode = "forward"}
    %stopped = sec.call "stem" (%x) args "$0" outs [""] : !sec.tensor<[B, 8], f32, grad>
    %d = sec.glue "aten.detach.default" (%stopped) args "$0" : !sec.tensor<[B, 8], f32>
    %scale = sec.param "scale" : !sec.tensor<[8], f32, grad>
    %mean = sec.param "mean" : !sec.tensor<[8], f32>
    // CHECK: %s = sec.glue "aten.mul.Tensor" {{.*}} {mode = "train"}
    %s = sec.glue "aten.mul.Tensor" (%l, %scale) args "$0, $1" : !sec.tensor<[B, 8], f32, grad>
    // CHECK-NEXT: %c = sec.glue "aten.sub.Tensor" {{.*}} {mode = "dgrad"}
    %c = sec.glue "aten.sub.Tensor" (%s, %mean) args "$0, $1" : !sec.tensor<[B, 8], f32, grad>
    // CHECK-NEXT: %y = sec.glue "aten.add.Tensor" (%c, %t) args "$0, $1" :
    %y = sec.glue "aten.add.Tensor" (%c, %t) args "$0, $1" : !sec.tensor<[B, 8], f32, grad>
    %z = sec.glue "aten.add.Tensor" (%y, %d) args "$0, $1" : !sec.tensor<[B, 8], f32, grad>
    %loss = sec.glue "aten.sum.default" (%z) args "$0" : !sec.tensor<[], f32, grad>
    sec.return (%loss)
  }
}
