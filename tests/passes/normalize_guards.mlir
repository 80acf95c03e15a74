// RUN: secc opt %s -p normalize-loss 2>&1 | filecheck %s

// Two captures of one pattern differ in what Python read. A rank reads it for a micro-batch, so a divisor cannot depend on it.

// CHECK: secc: loss.py:3: the divisor of loss term loss depends on what Python reads from a micro-batch (case padded)
// CHECK-NEXT: what to do: compute the divisor with tensor operations instead of Python branches

sec.graph "guarded" {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.block "net" class "Net" params 10 trainable 10
  sec.case "full" when [] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    %m = sec.input "mask" : !sec.tensor<[B], f32>
    %all = sec.glue "aten.all.default" (%m) args "$0" : !sec.tensor<[], bool>
    sec.guard (%all) equals "True"
    %y = sec.call "net" (%x) args "$0" outs [""] : !sec.tensor<[B, 8], f32, grad>
    %s = sec.glue "aten.sum.default" (%y) args "$0" at "loss.py:3" : !sec.tensor<[], f32, grad>
    %l = sec.glue "aten.div.Tensor" (%s) args "$0, B" : !sec.tensor<[], f32, grad>
    sec.return (%l)
  }
  sec.case "padded" when [] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    %m = sec.input "mask" : !sec.tensor<[B], f32>
    %all = sec.glue "aten.all.default" (%m) args "$0" : !sec.tensor<[], bool>
    sec.guard (%all) equals "False"
    %y = sec.call "net" (%x) args "$0" outs [""] : !sec.tensor<[B, 8], f32, grad>
    %s = sec.glue "aten.sum.default" (%y) args "$0" at "loss.py:3" : !sec.tensor<[], f32, grad>
    %n = sec.glue "aten.sum.default" (%m) args "$0" : !sec.tensor<[], f32>
    %l = sec.glue "aten.div.Tensor" (%s, %n) args "$0, $1" : !sec.tensor<[], f32, grad>
    sec.return (%l)
  }
}
